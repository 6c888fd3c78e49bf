"""Numbers in logs: plain decimal text, with an error that says where it stands."""

from __future__ import annotations

from megatron_ext.errors import UsageError


def parse_number(text: str, place: str) -> float:
    """Read a number; NaN and infinity are numbers here.

    Args:
        text: the cell, with or without blanks around it.
        place: file, line and column, for the error.

    Raises:
        UsageError: It is none. Python's underscores (``1_000``) are not accepted.
    """
    try:
        if "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise UsageError(f"{place}: {shown!r} is not a number") from None
