"""What a simulation found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from megatron_ext.pipeline.task import Task


class Cause(IntEnum):
    """Why a stage computed nothing. Names are as shown."""

    FILL = 0
    """Before its first task of a batch that starts with an empty pipeline."""
    FORWARD = 1
    """An activation was awaited and came."""
    BACKWARD = 2
    """A gradient was awaited and came, and the limit would have let a forward start."""
    MEMORY = 3
    """A gradient was awaited and came, and the limit let no forward start."""
    AGREEMENT = 4
    """Time of decisions, and everything else on top of a task's computing."""
    MESSAGE = 5
    """A blocking send."""
    UPDATE = 6
    """The optimizer step, and waiting for reductions, the norm, or weights not yet updated."""
    DRAIN = 7
    """After its last forward of a batch that empties the pipeline."""


@dataclass(frozen=True, slots=True)
class RanTask:
    """A task of a stage, and when it ran."""

    task: Task
    """With the microbatch counted over all iterations."""
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message, by the task that needs it."""

    kind: int
    microbatch: int
    """Counted over all iterations."""
    chunk: int
    at: float


@dataclass
class Recording:
    """Everything that happened on one stage of one replica."""

    tasks: list[RanTask] = field(default_factory=list)
    arrived: list[Delivered] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Outcome:
    """Result of one simulated run; lists are by [replica * stages + stage]."""

    makespan: float
    """From the start to the end of the last task or update."""
    peak_live: list[int]
    """Most chunk activations held at once."""
    busy: list[float]
    """Time in tasks."""
    idle: list[list[float]]
    """All other time, [rank][cause]."""
    batch_ended: list[float]
    """When the last task of each batch was done."""
    recordings: list[Recording] | None = None
    """Only if asked for."""

    @property
    def idle_by_cause(self) -> dict[str, float]:
        """Mean over the stages."""
        return {
            cause.name.lower(): sum(idle[cause] for idle in self.idle) / len(self.idle)
            for cause in Cause
        }
