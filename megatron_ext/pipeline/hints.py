"""Hints: which of the ready tasks a stage runs next.

A hint is a function of what is ready. It is asked only when something is, and it never waits for
a task that is not: the order it prefers is a preference, not a schedule (RRFP, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.pipeline.task import Direction, Task


@dataclass(slots=True)
class ReadySet:
    """What a stage could run now, and what a hint may base its choice on."""

    forward: Task | None = None
    """The next forward, where its input is here and the live limit lets it start."""
    backward: Task | None = None
    """The next backward, where its gradient is here."""
    last: Direction | None = None
    """Direction of the task that ran last in this batch."""


Hint = Callable[[ReadySet], Task | None]


def backward_forward(ready: ReadySet) -> Task | None:
    """BF: alternate one backward and one forward while both are ready, else run what is ready.

    RRFP, section 5 and Algorithm 1: a round tries a backward and then a forward, so a forward
    that is ready waits for at most one backward.
    """
    if ready.backward and (ready.last is not Direction.BACKWARD or not ready.forward):
        return ready.backward
    return ready.forward


HINTS: dict[str, Hint] = {"bf": backward_forward}
