"""Remembers which alerts a run has sent, across restarts: nobody is to be called twice.

The statistics in a checkpoint are older than an alert sent since. A run that goes on from it comes
to the same alarm again, near the same step.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from megatron_ext.collapse.alarm import Alarm

LEAST_WIDTH = 3
"""Alarms of a kind that began within so many steps are one event in the shortest run, too."""


class SentAlerts:
    """The alerts of one run.

    Args:
        file: Where they are kept; None to remember them in this process only.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._sent: list[tuple[str, int]] = []
        if file is None:
            return
        with contextlib.suppress(OSError):
            for line in file.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    fields = json.loads(line)
                    self._sent.append((str(fields["kind"]), int(fields["started_step"])))

    def has(self, alarm: Alarm, width: float) -> bool:
        """Whether an alert on this event has been sent.

        Args:
            alarm: What has rung.
            width: Alarms of a kind that began within so many steps are one event.
        """
        width = max(width, LEAST_WIDTH)
        return any(
            kind == alarm.kind and abs(step - alarm.started_step) <= width
            for kind, step in self._sent
        )

    def add(self, alarm: Alarm) -> None:
        """Remember an alert.

        Raises:
            OSError: It cannot be written; it is remembered in this process all the same.
        """
        self._sent.append((alarm.kind, alarm.started_step))
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps(alarm.to_json()) + "\n")

    def forget(self) -> None:
        """Begin anew: another run has begun in this folder."""
        self._sent = []
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
