"""The `megatron-ext` command: one subcommand per module, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext import __version__
from megatron_ext.errors import UsageError
from megatron_ext.python_version import MINIMUM_PYTHON, too_old


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: what the user types.
        summary: one line for `megatron-ext --help`.
        module: module with `add_arguments(parser)` and `run(args) -> int`, the exit status.
    """

    name: str
    summary: str
    module: str


COMMANDS = (
    Command(
        "collapse",
        "compare a run's normalised loss with a reference and predict its final loss",
        "megatron_ext.collapse.command",
    ),
    Command("corpus", "build a byte-level Megatron dataset from text files", "megatron_ext.corpus"),
    Command("doctor", "say what is installed and whether a run could start", "megatron_ext.doctor"),
    Command(
        "plot", "draw a run or a simulation for papers and slides", "megatron_ext.plot.command"
    ),
    Command("report", "join the traces of a run's ranks into one", "megatron_ext.report.command"),
    Command(
        "simulate",
        "simulate a pipeline with the arbiter and the hints of training",
        "megatron_ext.simulate.command",
    ),
    Command(
        "wandb-workspace",
        "make a wandb dashboard of what a training logs",
        "megatron_ext.wandb_workspace",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `megatron-ext` and return its exit status: 2 for a UsageError, else the module's own.

    Args:
        argv: the words after the command's name; those of this process if None.

    Raises:
        SystemExit: after --help and --version (status 0) and on unknown words (status 2).
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if sys.version_info[:2] < MINIMUM_PYTHON and "doctor" not in words:  # which says more
        print(f"megatron-ext: error: {too_old()}", file=sys.stderr)
        return 2
    args = build_parser(words).parse_args(words)
    try:
        return int(args.run(args))
    except UsageError as error:
        print(f"megatron-ext {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"megatron-ext {args.command}: interrupted", file=sys.stderr)
        return 130


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for `words`.

    Only the subcommand named in `words` gets its flags: a module may import Megatron and torch,
    which takes seconds, and --help must not wait for that.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-ext", description="Tools around megatron_ext.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"megatron_ext {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            allow_abbrev=False,
        )
        if command.name == chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
