r"""What megatron_ext does on one GPU: does it run, are the numbers Megatron's, what does it cost.

    scripts/gpu_check.sh --json out/gpu_check/gpu.json

Trains small models through the hooks with 1, 2 and 4 processes that share the GPU, and compares.
Every check stands alone: one that fails says why, the others go on, and the exit status is 1.
No network is needed. The table comes last. `--dry-run-cpu` does the same at tiny size on the CPU:
it tells whether the script works, not whether a GPU does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from gpu_check_checks import CHECKS, Outcome, run_check
from gpu_check_machine import describe
from gpu_check_runs import Runs
from gpu_check_tables import markdown, show
from rich.console import Console

from megatron_ext.corpus import build_corpus
from megatron_ext.errors import UsageError

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS_OF_THE_LIBRARY = ("email", "json", "logging", "unittest", "xml")
"""Enough text, and quickly read."""


def main() -> int:
    """Run the checks, write the JSON, print the table."""
    args = _parse()
    width = None if sys.stdout.isatty() else 132
    console = Console(soft_wrap=True, highlight=False, width=width)
    if args.table:
        try:
            print(markdown(json.loads(args.table.read_text())))
        except (OSError, ValueError, KeyError) as error:
            print(f"gpu_check: error: --table {args.table}: {error}", file=sys.stderr)
            return 2
        return 0
    machine = describe(REPOSITORY)
    if not args.dry_run_cpu and not machine["gpu"]:
        print(
            f"gpu_check: error: {machine['no_gpu']}; --dry-run-cpu does the same at tiny size "
            "without one",
            file=sys.stderr,
        )
        return 2
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        build_corpus(
            [Path(sysconfig.get_path("stdlib")) / part for part in PARTS_OF_THE_LIBRARY],
            args.out / "corpus",
            suffixes=[".py"],
            force=True,
        )
    except (UsageError, OSError) as error:
        print(f"gpu_check: error: no text to train on: {error}", file=sys.stderr)
        return 2
    runs = Runs(
        args.out.resolve(),
        args.out.resolve() / "corpus",
        cpu=args.dry_run_cpu,
        ends_at=started + args.limit_s,
    )
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "dry_run_cpu": args.dry_run_cpu,
        "machine": machine,
    }
    outcomes: list[Outcome] = []
    for check in CHECKS:
        if args.only and check.name not in args.only:
            continue
        console.print(f"{time.monotonic() - started:5.0f} s  {check.name} ...")
        outcome = run_check(check, runs, machine)
        outcomes.append(outcome)
        console.print(f"         {outcome.status}: {outcome.detail}")
        report |= _results(outcomes, runs, time.monotonic() - started)
        _write(args.json, report)  # also if a later check takes the machine down
    show(report, console)
    return 1 if any(outcome.status == "FAILED" for outcome in outcomes) else 0


def _results(outcomes: list[Outcome], runs: Runs, seconds: float) -> dict[str, Any]:
    records = [record for record in runs.done.values() if not isinstance(record, Exception)]
    return {
        "seconds": round(seconds, 1),
        "checks": [vars(outcome) for outcome in outcomes],
        "throughput": [
            {
                "run": record.training.title,
                "processes": record.training.ranks,
                "ms_per_iteration": round(record.iteration_ms, 2),
                "tokens_per_s": round(record.tokens_per_s),
                "memory_gib": round(record.memory_gib, 3),
                "first_loss": record.losses[0],
                "last_loss": record.losses[-1],
            }
            for record in records
        ],
    }


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    names = [check.name for check in CHECKS]
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print such a file in Markdown, run nothing"
    )
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny, on the CPU")
    parser.add_argument(
        "--only", nargs="+", metavar="CHECK", choices=names, help=f"of {', '.join(names)}"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=460.0,
        metavar="S",
        help="start nothing after this many seconds, and end what runs (default %(default)g)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=REPOSITORY / "out" / "gpu_check",
        metavar="DIR",
        help="where logs and traces go (default %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    # A plain `kill` ends it as Ctrl-C does: with the training processes stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("gpu_check: interrupted; the training processes are stopped", file=sys.stderr)
        sys.exit(130)
