"""One rank's trace, read back: tasks by batch, when messages left and arrived, waits."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
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
    about: dict[str, Any] = field(default_factory=dict)
    """What the file says of its rank and run."""
    batches: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Start and end of every training batch, by its iteration."""
    details: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What a batch says of itself, by its iteration."""
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    tasks: dict[int, list[RanTask]] = field(default_factory=dict)
    """Those that ran during a batch, by its iteration, in order. Under 2BW some are of the next
    batch."""
    all_tasks: list[RanTask] = field(default_factory=list)
    """In order, those of evaluations too."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    reductions: list[tuple[float, float]] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    """Pieces of updates that ran beside the next batch."""
    live: list[tuple[float, int]] = field(default_factory=list)
    """Chunk activations held, from that time on."""
    failure: str | None = None
    """Why the last batch ended early."""
    sent: dict[str, RanTask] = field(default_factory=dict)
    """The task that sent a message, by the number of its arrow."""
    arrived: dict[str, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    """When the task that a message is for began."""
    peak_live: int = 0
    wake_delays: dict[str, float] = field(default_factory=dict)
    """From the arrival that ended a wait to the start of the task it allowed, by the arrow."""

    @property
    def rank(self) -> int:
        """Its number."""
        return int(self.about["rank"])

    @property
    def settings(self) -> dict[str, Any]:
        """What the run's flags came to."""
        settings = self.about.get("settings")
        return dict(settings) if isinstance(settings, dict) else {}

    @property
    def live_limit(self) -> int | None:
        """Most microbatches that the rank may hold, where the trace says so."""
        limit = self.settings.get("live limit")
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def chunks(self) -> int:
        """Model chunks of the stage."""
        chunks = self.settings.get("chunks")
        return chunks if isinstance(chunks, int) and chunks > 0 else 1

    def first_microbatch(self, iteration: int) -> int:
        """Number of the first microbatch of a batch; above 0 where batches do not drain."""
        return int(self.details[iteration].get("first microbatch", 0))

    def owner(self, iteration: int, task: Task) -> tuple[int, Task]:
        """The iteration that a task is of, and the task with its microbatch counted in that.

        Args:
            iteration: During which it ran; under 2BW it may be of the next one.
            task: As traced.
        """
        size = int(self.details[iteration].get("microbatches", 0))
        place = task.microbatch - self.first_microbatch(iteration)
        if size and place >= size:
            return iteration + 1, Task(task.kind, place - size, task.chunk)
        if place == task.microbatch:
            return iteration, task
        return iteration, Task(task.kind, place, task.chunk)

    def owned(self) -> dict[int, list[RanTask]]:
        """The tasks of every iteration in the order in which they ran, microbatches from 0."""
        found: dict[int, list[RanTask]] = {}
        for iteration in sorted(self.tasks):
            for ran in self.tasks[iteration]:
                owner, task = self.owner(iteration, ran.task)
                found.setdefault(owner, []).append(RanTask(task, ran.started, ran.ended))
        return found

    def gaps(self, iteration: int) -> Iterator[tuple[int, Task, float]]:
        """Tasks that ran during a batch and that no wait or update precedes.

        Yields:
            The iteration that the task is of, the task, and the time since the task before.
        """
        apart = self._apart
        for before, after in pairwise(self.tasks[iteration]):
            first = bisect_right(apart, before.ended - _SLACK)
            if first == len(apart) or apart[first] > after.started:
                owner, task = self.owner(iteration, after.task)
                yield owner, task, max(after.started - before.ended, 0.0)

    @cached_property
    def _apart(self) -> list[float]:
        return sorted(start for start, _ in (*self.waits, *self.updates))

    @cached_property
    def continuous(self) -> frozenset[int]:
        """Iterations that go through the pipeline without a drain before or after them."""
        sharing = Counter(details["batch"] for details in self.details.values())
        starts = [start for start, _ in self.updates]
        return frozenset(
            iteration
            for iteration, (begin, end) in self.batches.items()
            if self.first_microbatch(iteration)
            or sharing[self.details[iteration]["batch"]] > 1
            or any(begin <= start <= end for start in starts)
        )


def read_rank(folder: Path, warnings: list[str] | None = None) -> dict[int, RankTrace]:
    """The traces in `folder`, by rank.

    Args:
        folder: Where a run's ranks wrote their traces.
        warnings: Gets a line for what is missing; without it, a file that is cut off is refused.

    Raises:
        UsageError: There are none, those of several runs, or one is cut off or damaged.
    """
    files = rank_files(folder, [] if warnings is None else warnings)
    found = {}
    for file in files:
        try:
            found[int(file.about["rank"])] = _read(file, warnings)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{file.path} is damaged ({type(error).__name__}: {error})") from None
    return found


def _read(file: RankFile, tolerated: list[str] | None) -> RankTrace:
    """One file."""
    about = file.about
    trace = RankTrace(int(about["world size"]), int(about["stage"]), list(about["pipeline"]), about)
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
        elif phase == "C" and event["name"] == "live":
            trace.live.append((at, int(event["args"]["microbatches"])))
        elif phase == "i":
            trace.failure = str(event["args"].get("error", "failed"))
    if warnings and tolerated is None:
        raise UsageError(f"{warnings[0]}; trace a run that ends well")
    if tolerated is not None:
        tolerated += warnings
    trace.used = used
    trace.live.sort()
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
        iteration = int(name.split()[1])
        trace.batches[iteration] = (at, end)
        trace.details[iteration] = {**about, "batch": int(about["batch"])}
        trace.peak_live = max(trace.peak_live, int(about["microbatches live at most"]))
    elif category == "tasks" and _TASK.fullmatch(name):
        task = Task(_KINDS[name[0]], int(about["microbatch"]), int(about["chunk"]))
        ran.append(RanTask(task, at, end))
    elif category == "tasks" and name == "wait":
        trace.waits.append((at, end))
    elif category == "batches":
        trace.evaluations.append((at, end))
    elif category == "tasks" and name == "reduce gradients":
        trace.reductions.append((at, end))
    elif category == "tasks" and name == "update":
        trace.updates.append((at, end))


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
