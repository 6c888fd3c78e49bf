"""`megatron-ext collapse predict`: rank unfinished runs and say which to stop."""

from __future__ import annotations

import argparse

from megatron_ext.collapse.check import check
from megatron_ext.collapse.commands import flags
from megatron_ext.collapse.predict import Candidate, rank
from megatron_ext.progress import ProgressLine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"finished or not: {flags.SOURCES}")
    flags.add_reference_flags(parser)
    flags.add_source_flags(parser)
    flags.add_control_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Predict, rank and print.

    Raises:
        UsageError: A source or flag cannot work.
    """
    references = flags.read_references(args)
    results = []
    with ProgressLine("predict", len(args.runs), "runs") as progress:
        for place, name in enumerate(args.runs):
            progress.update(place, name)
            history = flags.read_run(name, args)
            results.append(
                check(history, references, flags.check_config(args, references, history))
            )
    candidates = rank(results)
    if args.json:
        flags.print_json({"runs": [each.to_json() for each in candidates]})
    else:
        print("\n".join(_describe(candidates)))
    return 0


def _describe(candidates: list[Candidate]) -> list[str]:
    lines = [
        f"{'rank':>4}  {'final loss':>10}  {'95% interval':>17}  {'seen':>5}  {'best':>5}  "
        f"{'regret':>7}  what to do"
    ]
    for each in candidates:
        if each.predicted_final_loss is None or each.interval is None:
            lines.append(f"   -  {each.run}: {'; '.join(each.reasons)}")
            continue
        low, high = each.interval
        action = "stop" if each.stop else "go on"
        if each.provisional:
            action = "go on, too early to say"
        elif each.stop:
            action = f"stop; if wrong, {each.regret_if_wrong:.4f} is lost"
        alarms = f", {each.alarms} alarms" if each.alarms else ""
        lines.append(
            f"{each.rank:>4}  {each.predicted_final_loss:>10.4f}  {low:>8.4f}-{high:<8.4f}  "
            f"{each.fraction:>5.2f}  {each.best_probability or 0:>5.0%}  {each.regret or 0:>7.4f}  "
            f"{action}  {each.run}{alarms}"
        )
    return lines
