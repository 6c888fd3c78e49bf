"""How far a stage's host ran ahead of its GPU, from the traces of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SLACK_US = 50.0
"""How far the clocks of host and GPU may be apart."""


def queue_depths(folder: Path, *, device: bool) -> list[int]:
    """For every traced task, how many earlier ones were unfinished when it was chosen.

    Args:
        folder: Of the traces, one file per rank.
        device: Whether tasks end on a GPU, by its events; else when the host says so.

    Raises:
        ValueError: There is no such task.
    """
    depths = []
    for file in sorted(folder.glob("rank-*.json")):
        events = [
            event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"
        ]
        batches = [event for event in events if event["cat"] == "batches"]
        for batch in batches:
            inside = [event for event in events if _within(event, batch)]
            depths += _of_batch(inside, device=device)
    if not depths:
        track = "device" if device else "tasks"
        raise ValueError(f"the traces in {folder} have nothing on the track {track!r}")
    return depths


def _of_batch(events: list[dict[str, Any]], *, device: bool) -> list[int]:
    chosen = {
        event["name"]: event["ts"]
        for event in events
        if event["cat"] == "tasks" and "microbatch" in event["args"]
    }
    ends = {
        event["name"]: event["ts"] + event["dur"]
        for event in events
        if event["cat"] == ("device" if device else "tasks") and event["name"] in chosen
    }
    return [
        sum(
            end > at + SLACK_US
            for other, end in ends.items()
            if chosen[other] < at  # an earlier one
        )
        for name, at in chosen.items()
        if name in ends
    ]


def _within(event: dict[str, Any], batch: dict[str, Any]) -> bool:
    return bool(batch["ts"] <= event["ts"] <= batch["ts"] + batch["dur"])
