"""`megatron-ext collapse check`: one run against a reference."""

from __future__ import annotations

import argparse

from megatron_ext.collapse.check import check, describe
from megatron_ext.collapse.commands import flags

ALARMED, REFUSED = 3, 4
"""Exit status with --strict."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    parser.add_argument("source", metavar="RUN", help=f"finished or not: {flags.SOURCES}")
    flags.add_reference_flags(parser)
    flags.add_source_flags(parser)
    flags.add_control_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"exit with {ALARMED} after an alarm, with {REFUSED} if the runs are not comparable",
    )


def run(args: argparse.Namespace) -> int:
    """Check and print.

    Raises:
        UsageError: A source or flag cannot work.
    """
    history = flags.read_run(args.source, args)
    references = flags.read_references(args)
    config = flags.check_config(args, references, history)
    result = check(history, references, config)
    if args.json:
        flags.print_json(result.to_json())
    else:
        print("\n".join(describe(result, args.force)))
    if not args.strict:
        return 0
    if result.alarms:
        return ALARMED
    return 0 if result.comparable or args.force else REFUSED
