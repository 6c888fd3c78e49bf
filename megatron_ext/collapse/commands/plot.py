"""`megatron-ext collapse plot`: curves and residuals as a PNG picture, alone or in an HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ext.collapse.check import check, describe
from megatron_ext.collapse.commands import flags
from megatron_ext.collapse.curve import Curve
from megatron_ext.collapse.curve_file import write_text
from megatron_ext.collapse.page import page
from megatron_ext.collapse.picture import RunPicture, draw, run_picture
from megatron_ext.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"finished or not: {flags.SOURCES}")
    flags.add_reference_flags(parser, also_forced="replace files that exist")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="picture to write")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="page to write")
    flags.add_source_flags(parser)
    flags.add_control_flags(parser)
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Draw and write.

    Raises:
        UsageError: A source or flag cannot work, or a file exists.
    """
    targets = [target for target in (args.out, args.html) if target is not None]
    if not targets:
        raise UsageError("nothing to write: give --out FILE.png or --html FILE.html")
    for target in targets:  # before the work, not after it
        if target.exists() and not args.force:
            raise UsageError(f"{target}: exists; give another name, or --force to replace it")
    references = flags.read_references(args)
    drawn, texts = pictures_of(args, references)
    picture = draw(references, drawn)
    if args.out is not None:
        write_text(args.out, picture, force=True)
    if args.html is not None:
        write_text(args.html, page("Collapse", picture, texts), force=True)
    written = [str(target) for target in targets]
    if args.json:
        flags.print_json({"written": written})
    else:
        print("\n".join(f"wrote {name}" for name in written))
    return 0


def pictures_of(
    args: argparse.Namespace, references: list[Curve]
) -> tuple[list[RunPicture], list[tuple[str, list[str]]]]:
    """The runs that the flags name, each compared with a reference.

    Returns:
        What to draw, and the name of each run with the result in lines.

    Raises:
        UsageError: A source or flag cannot work.
    """
    drawn: list[RunPicture] = []
    texts: list[tuple[str, list[str]]] = []
    for name in args.runs:
        history = flags.read_run(name, args)
        config = flags.check_config(args, references, history)
        result = check(history, references, config)
        drawn.append(run_picture(history, result, references, config.smooth_steps))
        texts.append((result.run, describe(result, args.force)))
    return drawn, texts
