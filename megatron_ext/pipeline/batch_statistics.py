"""What one batch did on one stage: every task, wait and message with its time.

The executor records always, since a tuple in a list costs next to nothing beside a task; metrics
and traces are made from the record afterwards. Pure Python. Times are seconds of
`time.perf_counter`: on a GPU a task ends here when its kernels are enqueued, not when they are
done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_ext.pipeline.task import Header, Kind, Task

NEVER = float("nan")


class Span(NamedTuple):
    """Something that took time."""

    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started


class TaskSpan(NamedTuple):
    """A task and when it ran."""

    task: Task
    started: float
    ended: float


class MessageTime(NamedTuple):
    """A message and when it was handed to the transport, or had arrived whole."""

    header: Header
    at: float


class UpdateFacts(NamedTuple):
    """The update of a batch that is delayed by a step, made beside the next batch's tasks."""

    began: float
    """When the batch's tasks were done."""
    ended: float
    """When the new weights were there."""
    version_lag: int
    """By how many updates the weights that the gradient was computed on had fallen behind."""
    grad_norm: float | None
    """Before clipping; this stage's own unless all stages clip together."""


class Load(NamedTuple):
    """How much a stage had to choose from and to hold, at a decision."""

    at: float
    ready: int
    live: int


@dataclass
class BatchStatistics:
    """What one batch cost on this stage."""

    forward_only: bool
    number: int = 0
    """Running number of the batch, training and evaluation counted together."""
    iteration: int = 0
    """Training iteration, from 1; that of the last training batch in an evaluation."""
    first_microbatch: int = 0
    """Number of its first microbatch; above 0 where batches go on without a drain."""
    microbatches: int = 0
    """How many microbatches it has."""
    weight_lag: int = 0
    """How many updates older than the newest weights those are that it computes with."""
    peak_live: int = 0
    """Most chunk activations held at once."""
    started: float = NEVER
    """When the stage began to look for its first task."""
    ended: float = NEVER
    """When its last task was done and its last message taken."""
    dispatch_s: list[float] = field(default_factory=list)
    """Time of every decision that chose a task."""
    agreement_s: list[float] = field(default_factory=list)
    """The same, where the ranks of a tensor-parallel group decide together."""
    tasks: list[TaskSpan] = field(default_factory=list)
    """The tasks as they ran."""
    device_tasks: list[TaskSpan] = field(default_factory=list)
    """When a GPU ran them; only in a run that is traced."""
    waits: list[Span] = field(default_factory=list)
    """When nothing was ready."""
    reductions: list[Span] = field(default_factory=list)
    """When gradients were reduced after the last task."""
    updates: list[Span] = field(default_factory=list)
    """When an update computed between tasks, where it runs beside the next batch."""
    delayed_update: UpdateFacts | None = None
    """Where the update ran beside the next batch: how late it was."""
    sent: list[MessageTime] = field(default_factory=list)
    arrived: list[MessageTime] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    """Only in a run that is traced."""

    @contextlib.contextmanager
    def running(self, task: Task) -> Iterator[None]:
        """Record that the body runs `task`, also if it fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.tasks.append(TaskSpan(task, started, time.perf_counter()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that nothing is ready during the body; one wait goes on until a task runs."""
        started = time.perf_counter()
        if self.waits and (not self.tasks or self.tasks[-1].ended <= self.waits[-1].started):
            started = self.waits.pop().started
        try:
            yield
        finally:
            self.waits.append(Span(started, time.perf_counter()))

    @contextlib.contextmanager
    def timed(self, spans: list[Span]) -> Iterator[None]:
        """Record the time of the body in one of the lists above, also if it fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spans.append(Span(started, time.perf_counter()))

    @property
    def order(self) -> list[Task]:
        """The tasks as they ran."""
        return [span.task for span in self.tasks]

    @property
    def seconds(self) -> float:
        """From the first look for a task to the end of the last one."""
        return self.ended - self.started

    @property
    def busy_s(self) -> float:
        """Time in tasks."""
        return sum(ended - started for _, started, ended in self.tasks)

    @property
    def waiting_s(self) -> float:
        """Time with nothing ready."""
        return sum(ended - started for started, ended in self.waits)

    @property
    def bubble_fraction(self) -> float:
        """The part of this stage's own batch time in which no task ran."""
        return 1 - self.busy_s / self.seconds

    def update_wait_s(self) -> float:
        """Time under a delayed update with neither a task nor a part of the update running."""
        if self.delayed_update is None:
            return NEVER
        began, ended, *_ = self.delayed_update
        spans = [(start, end) for _, start, end in self.tasks]
        spans += [(span.started, span.ended) for span in self.updates]
        # Task by task, they do not overlap.
        busy = sum(max(0.0, min(end, ended) - max(start, began)) for start, end in spans)
        return max(0.0, ended - began - busy)

    def message_ages_s(self) -> list[float]:
        """How long each message lay here before its task began; the unused ones are left out."""
        began = {task: started for task, started, _ in self.tasks}
        return [
            began[task] - at for header, at in self.arrived if (task := consumer(header)) in began
        ]


def consumer(header: Header) -> Task:
    """The task that uses a message."""
    return Task(Kind(header.direction), header.microbatch, header.chunk)
