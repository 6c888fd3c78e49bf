"""`megatron-ext report`: turn the traces that a run's ranks wrote into something to look at."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine
from megatron_ext.report.joined_trace import join_traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="the directory given to --rrfp-trace"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write one Chrome trace of all ranks, clocks aligned; compressed if FILE ends in .gz",
    )


def run(args: argparse.Namespace) -> int:
    """Write what was asked for.

    Raises:
        UsageError: Nothing was asked for, or DIR does not hold the traces of one run.
    """
    if args.trace is None:
        raise UsageError("nothing to write: give --trace FILE")
    with ProgressLine("report", None, "ranks") as progress:
        joined = join_traces(args.folder, args.trace, on_rank=progress.update)
    for warning in joined.warnings:
        print(f"megatron-ext report: warning: {warning}", file=sys.stderr)
    print(
        f"wrote {args.trace}: {joined.events} events of {joined.ranks} ranks, clocks aligned to "
        f"within {joined.uncertainty_us:.0f} us; open it in ui.perfetto.dev or chrome://tracing"
    )
    return 0
