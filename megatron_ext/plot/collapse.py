"""Normalised loss curves of runs over their reference, and what is left, with alarms."""

from __future__ import annotations

import argparse

from matplotlib.figure import Figure

from megatron_ext.collapse.commands import flags
from megatron_ext.collapse.commands.plot import pictures_of
from megatron_ext.collapse.picture import figure_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this kind."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"finished or not: {flags.SOURCES}")
    flags.add_reference_flags(parser)
    flags.add_source_flags(parser)
    flags.add_control_flags(parser)


def draw(args: argparse.Namespace) -> Figure:
    """Compare and draw.

    Raises:
        UsageError: A source or flag cannot work.
    """
    references = flags.read_references(args)
    drawn, _ = pictures_of(args, references)
    return figure_of(references, drawn)
