"""Where traces go, which iterations they cover, and how to know their files again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FORMAT = "megatron_ext trace 1"
"""Value of ``otherData.format`` in a rank's file."""
FILE_NAME = "rank-{:05}.json"
FILE_PATTERN = "rank-*.json"


@dataclass(frozen=True)
class TraceWindow:
    """Where traces go and which iterations they cover."""

    folder: Path
    first: int = 1
    last: int | None = None
    """The last traced iteration; None for all that follow."""

    @staticmethod
    def parse(text: str) -> TraceWindow:
        """Turn ``DIR`` or ``DIR:FIRST-LAST`` into a window.

        Raises:
            ValueError: The window is malformed or empty.
        """
        match = re.fullmatch(r"(?P<folder>.+?)(:(?P<first>\d+)-(?P<last>\d+))?", text)
        if not match or re.search(r":[\d-]*$", match["folder"]):
            raise ValueError(f"{text!r} is neither DIR nor DIR:FIRST-LAST, such as out/trace:5-7")
        if match["first"] is None:
            return TraceWindow(Path(text))
        first, last = int(match["first"]), int(match["last"])
        if not 1 <= first <= last:
            raise ValueError(f"{text!r} has no iteration: they count from 1, FIRST-LAST inclusive")
        return TraceWindow(Path(match["folder"]), first, last)

    def holds(self, iteration: int) -> bool:
        """Whether `iteration`, counted from 1, is to be traced."""
        return self.first <= iteration and (self.last is None or iteration <= self.last)

    def __str__(self) -> str:
        if self.last is None:
            return str(self.folder)
        return f"{self.folder}:{self.first}-{self.last}"
