"""Which part of a source to read."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.errors import UsageError


@dataclass(frozen=True)
class SourceOptions:
    """What the user says about a source.

    Attributes:
        column: name of the loss's column, tag or metric; None to guess.
        where: columns and the values they must have, to pick one run out of several.
        axis: column of steps or tokens to use as the axis; None to guess.
        end_step: the last step planned; None where the source says so or the run is complete.
    """

    column: str | None = None
    where: dict[str, str] = field(default_factory=dict)
    axis: str | None = None
    end_step: float | None = None


def parse_where(text: str | None) -> dict[str, str]:
    """Read ``size=1B,budget=1xC``.

    Raises:
        UsageError: A part is no ``name=value``, or a name occurs twice.
    """
    where: dict[str, str] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"--where: {part.strip()!r} is no name=value")
        if name in where:
            raise UsageError(f"--where: {name!r} is given twice")
        where[name] = value.strip()
    return where


def same_value(cell: str, wanted: str) -> bool:
    """Whether two texts are equal, or are the same number."""
    if cell == wanted:
        return True
    try:
        return float(cell) == float(wanted)
    except ValueError:
        return False
