"""What a report is made of, before it becomes HTML: text is plain here and escaped later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str
    kind: str = "paragraph"


@dataclass(frozen=True)
class Note:
    """A remark that stands out: level is "note" or "alarm"."""

    text: str
    level: str = "note"
    kind: str = "note"


@dataclass(frozen=True)
class Code:
    """Something to type, or lines of a terminal."""

    text: str
    label: str
    kind: str = "code"


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its heading."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    """Rows that stand out."""
    is_text: bool = False
    """Whether cells are words, and not numbers to be aligned."""
    keeps_lines: bool = False
    """Whether cells are not to be broken into lines."""
    folded: bool = False
    """Whether it is shown only when asked for."""
    kind: str = "table"


@dataclass(frozen=True)
class Picture:
    """A drawing with what it shows in words."""

    svg: Markup
    caption: str
    keys: Sequence[tuple[str, str]] = ()
    """Class and name of what the colours mean."""
    kind: str = "picture"


@dataclass(frozen=True)
class Timeline:
    """A picture that the script replaces by one to move in."""

    name: str
    label: str
    picture: Picture
    heading: str
    """Above it; empty for none."""
    data: str
    """JSON for the script, safe inside a script element."""
    kind: str = "timeline"


type Block = Paragraph | Note | Code | Table | Picture | Timeline


@dataclass
class Pair:
    """Blocks side by side where there is room, one of each run."""

    blocks: Sequence[Block]


@dataclass
class Section:
    """A part of the page under a heading."""

    anchor: str
    title: str
    blocks: list[Block | Pair] = field(default_factory=list)


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A number for a table; a dash where there is none."""
    return "–" if value is None or value != value else f"{value:,.{digits}f}{unit}"  # noqa: RUF001


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction in percent."""
    return number(None if value is None else 100 * value, digits, " %")


def duration(milliseconds: float | None) -> str:
    """A time in the unit that suits it."""
    if milliseconds is None or milliseconds != milliseconds:
        return number(None)
    if abs(milliseconds) >= 10_000:
        return number(milliseconds / 1e3, 1, " s")
    if abs(milliseconds) >= 1:
        return number(milliseconds, 1, " ms")
    return number(milliseconds * 1e3, 0, " µs")


def size(count: float | None) -> str:
    """Bytes in the unit that suits them."""
    if count is None:
        return number(None)
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return number(count / factor, 2 if unit == "GiB" else 0, f" {unit}")
    return number(count, 0, " B")
