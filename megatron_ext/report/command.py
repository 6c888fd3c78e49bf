"""`megatron-ext report`: a page about a run, or its ranks' traces as one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine
from megatron_ext.report.joined_trace import join_traces

_MOST_RUNS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "folders",
        metavar="RUN_DIR",
        nargs="+",
        type=Path,
        help="the directory given to --rrfp-trace, or one that holds it beside logs, TensorBoard's "
        "or wandb's files and collapse curves; two for a comparison",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write a page about the run, *.html"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write one Chrome trace of all ranks, clocks aligned; compressed if FILE ends in .gz",
    )
    parser.add_argument(
        "--column", metavar="NAME", help="which loss the page shows (default: guessed)"
    )


def run(args: argparse.Namespace) -> int:
    """Write what was asked for.

    Raises:
        UsageError: Nothing was asked for, or a directory does not hold what is needed.
    """
    if args.trace is None and args.output is None:
        raise UsageError("nothing to write: give -o FILE.html or --trace FILE")
    if len(args.folders) > (_MOST_RUNS if args.trace is None else 1):
        most = "two" if args.trace is None else "one, with --trace,"
        raise UsageError(
            f"{len(args.folders)} directories; {most} at most can be reported together"
        )
    if args.trace is not None:
        _join(args.folders[0], args.trace)
    if args.output is not None:
        _write_page(args.folders, args.output, args.column)
    return 0


def _join(folder: Path, target: Path) -> None:
    with ProgressLine("report", None, "ranks") as progress:
        joined = join_traces(folder, target, on_rank=progress.update)
    for warning in joined.warnings:
        print(f"megatron-ext report: warning: {warning}", file=sys.stderr)
    print(
        f"wrote {target}: {joined.events} events of {joined.ranks} ranks, clocks aligned to "
        f"within {joined.uncertainty_us:.0f} us; open it in ui.perfetto.dev or chrome://tracing"
    )


def _write_page(folders: list[Path], target: Path, column: str | None) -> None:
    """Write the page, whole or not at all."""
    if target.suffix not in (".html", ".htm"):
        raise UsageError(f"-o {target}: the name must end in .html")
    # Not above: joining traces needs none of it.
    from megatron_ext.report.page import page
    from megatron_ext.report.run import read_run

    def on_step(step: str) -> None:
        if sys.stderr.isatty():
            print(f"megatron-ext report: {step}", file=sys.stderr)

    runs = [read_run(folder, column=column, on_step=on_step) for folder in folders]
    if len(runs) > 1 and runs[0].name == runs[1].name:
        for each, folder in zip(runs, folders, strict=True):
            each.name = str(folder)
    text = page(runs)
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"-o {target}: cannot write it ({error.strerror})") from None
    for each in runs:
        for note in [*each.folder.notes, *each.missing]:
            print(f"megatron-ext report: {each.name}: {note}", file=sys.stderr)
    print(f"wrote {target}: {len(text) / 1e6:.1f} MB; open it in a browser, it needs no network")
