"""Progress of something slow: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class ProgressLine:
    """Show how far one piece of work has come; use it as a context manager.

    A terminal gets a bar that redraws itself. A file or pipe gets one line now and then, so
    that a log shows life without being flooded; work that ends sooner writes nothing there.

    Args:
        title: what is being done, a few words.
        total: how many units there are in all, or None while that is unknown.
        unit: the name of one unit, plural ("files", "iterations").
        stream: where to write; standard error if None.
        interval: seconds between two plain lines.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        stream: IO[str] | None = None,
        interval: float = 5.0,
    ) -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._interval = interval
        self._started = time.monotonic()
        self._printed = self._started
        console = Console(file=self._stream)
        self._bar = (
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=console,
            )
            if console.is_terminal
            else None
        )
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=total, note="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """Say that `done` units are finished; call it as often as you like.

        Args:
            done: units finished so far.
            note: a few words shown beside the count, such as the current loss.
            total: how many units there are in all, once that is known.
        """
        if total is not None:
            self._total = total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, note=note)
            return
        now = time.monotonic()
        if now - self._printed < self._interval:
            return
        self._printed = now
        count = f"{done}" if self._total is None else f"{done}/{self._total}"
        words = [f"{count} {self._unit}", note, f"{now - self._started:.0f} s"]
        line = f"{self._title}: {', '.join(word for word in words if word)}"
        print(line, file=self._stream, flush=True)
