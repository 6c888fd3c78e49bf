"""`megatron-ext plot`: one picture per kind, each in a module of its own."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from megatron_ext.errors import UsageError

PLOTS = {
    "timeline": ("every task of every stage over time", "megatron_ext.plot.timeline"),
    "collapse": ("normalised losses over a reference", "megatron_ext.plot.collapse"),
    "speedup": ("simulated speedup over 1F1B against jitter", "megatron_ext.plot.speedup"),
}
"""Summary and module of each kind; a module has `add_arguments(parser)` and `draw(args)`."""

FORMATS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of pictures and their flags."""
    kinds = parser.add_subparsers(dest="plot", metavar="PLOT", required=True)
    for name, (summary, module) in PLOTS.items():
        kind = kinds.add_parser(
            name, help=summary, description=f"Draw {summary}.", allow_abbrev=False
        )
        kind.add_argument(
            "-o", "--output", type=Path, required=True, metavar="FILE", help="*.png, *.svg or *.pdf"
        )
        importlib.import_module(module).add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    """Draw the picture.

    Raises:
        UsageError: Its input cannot be used, or the file cannot be written.
    """
    target: Path = args.output
    if target.suffix not in FORMATS:
        raise UsageError(f"-o {target}: the name must end in {', '.join(FORMATS)}")
    from megatron_ext.plot.picture import save

    figure = importlib.import_module(PLOTS[args.plot][1]).draw(args)
    save(figure, target)
    print(f"wrote {target}")
    return 0
