"""One rank's trace, read back: tasks by batch, when messages left and arrived, waits."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.report.joined_trace import RankFile, rank_events, rank_files
from megatron_ext.simulate.outcome import RanTask

_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "W": Kind.WEIGHT}
_TASK = re.compile(r"[FBW] \d+(\.\d+)?")
_SLACK = 2e-3  # of times that were rounded, in ms


@dataclass
class RankTrace:
    """Times are milliseconds on the first rank's clock."""

    world_size: int
    stage: int
    pipeline: list[int]
    """The ranks of this rank's pipeline, stage by stage."""
    batches: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Start and end of every training batch, by its running number."""
    iterations: dict[int, int] = field(default_factory=dict)
    tasks: dict[int, list[RanTask]] = field(default_factory=dict)
    """By batch, in order."""
    all_tasks: list[RanTask] = field(default_factory=list)
    """In order, those of evaluations too."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    sent: dict[str, RanTask] = field(default_factory=dict)
    """The task that sent a message, by the number of its arrow."""
    arrived: dict[str, float] = field(default_factory=dict)
    peak_live: int = 0
    wake_delays: dict[str, float] = field(default_factory=dict)
    """From the arrival that ended a wait to the start of the task it allowed, by the arrow."""

    def gaps(self, number: int) -> Iterator[tuple[Task, float]]:
        """Tasks of a batch that no wait precedes, and the time since the task before."""
        waited = sorted(start for start, _ in self.waits)
        for before, after in pairwise(self.tasks[number]):
            first = bisect_right(waited, before.ended - _SLACK)
            if first == len(waited) or waited[first] > after.started:
                yield after.task, max(after.started - before.ended, 0.0)


def read_rank(folder: Path) -> dict[int, RankTrace]:
    """The traces in `folder`, by rank.

    Raises:
        UsageError: There are none, those of several runs, or one is cut off.
    """
    return {int(file.about["rank"]): _read(file) for file in rank_files(folder, [])}


def _read(file: RankFile) -> RankTrace:
    """One file."""
    about = file.about
    trace = RankTrace(int(about["world size"]), int(about["stage"]), list(about["pipeline"]))
    warnings: list[str] = []
    ran: list[RanTask] = []
    sent: list[tuple[str, float]] = []
    used: dict[str, float] = {}
    for event in rank_events(file.path, warnings):
        if "ts" not in event:
            continue
        at = (float(event["ts"]) - file.offset_us) * 1e-3
        phase = event["ph"]
        if phase == "X":
            _slice(trace, ran, event, at)
        elif phase == "s":
            sent.append((event["id"], at))
        elif phase == "t":
            trace.arrived[event["id"]] = at
        elif phase == "f":
            used[event["id"]] = at
    if warnings:
        raise UsageError(f"{warnings[0]}; trace a run that ends well")
    ran.sort(key=lambda one: one.started)
    trace.all_tasks = ran
    for number, (start, end) in trace.batches.items():
        trace.tasks[number] = [
            one for one in ran if start - _SLACK <= one.started and one.ended <= end + _SLACK
        ]
    starts = [one.started for one in ran]
    for flow, at in sent:
        index = bisect_right(starts, at + _SLACK) - 1
        if index >= 0:
            trace.sent[flow] = ran[index]
    _wakes(trace, used)
    return trace


def _slice(trace: RankTrace, ran: list[RanTask], event: dict[str, Any], at: float) -> None:
    """Take in a bar: a batch, a task or a wait."""
    name, category, about = event["name"], event["cat"], event["args"]
    end = at + float(event["dur"]) * 1e-3
    if category == "batches" and name.startswith("iteration "):
        number = int(about["batch"])
        trace.batches[number] = (at, end)
        trace.iterations[number] = int(name.split()[1])
        trace.peak_live = max(trace.peak_live, int(about["microbatches live at most"]))
    elif category == "tasks" and _TASK.fullmatch(name):
        task = Task(_KINDS[name[0]], int(about["microbatch"]), int(about["chunk"]))
        ran.append(RanTask(task, at, end))
    elif category == "tasks" and name == "wait":
        trace.waits.append((at, end))


def _wakes(trace: RankTrace, used: dict[str, float]) -> None:
    """Delays from arrivals during a wait to the task that they allowed."""
    spans = sorted(trace.waits)
    starts = [start for start, _ in spans]
    for flow, at in trace.arrived.items():
        index = bisect_right(starts, at) - 1
        if flow not in used or index < 0:
            continue
        end = spans[index][1]
        # The message ended this wait if its task follows at once.
        if at <= end and 0 <= used[flow] - end < 1.0:
            trace.wake_delays[flow] = used[flow] - at
