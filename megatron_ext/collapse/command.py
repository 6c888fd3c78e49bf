"""`megatron-ext collapse`: its subcommands, each imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Subcommand:
    """One subcommand, in the module of its name under `megatron_ext.collapse.commands`."""

    name: str
    summary: str


SUBCOMMANDS = (
    Subcommand("fit", "make curve files from finished runs and fit the form to them"),
    Subcommand("check", "compare a run with a reference: final loss, deviation, alarms"),
    Subcommand("predict", "rank unfinished runs by predicted final loss and say which to stop"),
    Subcommand("recipe", "work out batch, tau and weight decay as Megatron's flags"),
    Subcommand("plot", "draw curves and residuals"),
)


class _LazyParser(argparse.ArgumentParser):
    """A subcommand's parser, which imports the subcommand when it is first used."""

    def __init__(self, *args: Any, subcommand: str | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self._subcommand = subcommand

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Argparse's, with the subcommand's flags."""
        if self._subcommand is not None:
            name, self._subcommand = self._subcommand, None
            module = importlib.import_module(f"megatron_ext.collapse.commands.{name}")
            module.add_arguments(self)
            self.set_defaults(run_subcommand=module.run)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    subparsers = parser.add_subparsers(
        dest="subcommand", metavar="SUBCOMMAND", required=True, parser_class=_LazyParser
    )
    for each in SUBCOMMANDS:
        subparsers.add_parser(
            each.name,
            help=each.summary,
            description=f"{each.summary[0].upper()}{each.summary[1:]}.",
            allow_abbrev=False,
            subcommand=each.name,
        )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand that was chosen.

    Raises:
        UsageError: A source or flag cannot work.
    """
    try:
        status = int(args.run_subcommand(args))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
