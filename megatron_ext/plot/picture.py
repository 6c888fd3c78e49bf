"""Colours that all pictures share, and files that depend on the data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.task import Kind

FILL = {Kind.FORWARD: "#2f6fbd", Kind.BACKWARD: "#2c8a57", Kind.WEIGHT: "#8a5bb0"}
NAME = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT: "weight gradient",
}
INK = "#4a525c"
_DOTS_PER_INCH = 160


def save(figure: Figure, target: Path) -> None:
    """Write a figure; the same figure gives the same bytes.

    Raises:
        UsageError: The file cannot be written.
    """
    no_date: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(
        target.suffix, {}
    )
    try:
        with rc_context({"svg.hashsalt": "megatron_ext"}):
            figure.savefig(target, dpi=_DOTS_PER_INCH, bbox_inches="tight", metadata=no_date)
    except OSError as error:
        raise UsageError(f"-o {target}: cannot write it ({error.strerror})") from None
