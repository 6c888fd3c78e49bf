"""One batch on a simulated pipeline of real arbiters: what the property tests drive."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ext.pipeline.hints import HINTS, Hint
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.simulate import engine
from megatron_ext.simulate.network import Hop
from megatron_ext.simulate.pipeline import Pipeline, Policy
from megatron_ext.simulate.task_times import TaskTimes

FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
Durations = Sequence[Sequence[float]]  # [stage][microbatch]


@dataclass
class Outcome:
    """What a simulated batch did."""

    makespan: float = 0
    orders: list[list[Task]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def simulate(
    forward: Durations,
    backward: Durations,
    *,
    hint: type[Hint],
    limits: Sequence[int],
    chunks: int = 1,
    weight_share: float = 0.5,
    latency: Callable[[], float] = lambda: 0,
) -> Outcome:
    """Run one batch; messages take `latency` each and may overtake one another.

    With a hint that splits off weight gradients they take `weight_share` of the backward's time.
    """
    stages, microbatches = len(forward), len(forward[0])
    pipeline = Pipeline(stages, microbatches, chunks)
    whole = np.repeat(np.array(backward, dtype=float), chunks, axis=0)
    times = TaskTimes(
        np.repeat(np.array(forward, dtype=float), chunks, axis=0), whole, whole * weight_share
    )
    (name,) = (name for name, known in HINTS.items() if known is hint)
    rows = [
        [array("d", (latency() for _ in range(microbatches))) for _ in range(stages * chunks)]
        for _ in range(2)
    ]
    found = engine.simulate(
        pipeline,
        times,
        Policy(name, ",".join(map(str, limits))),
        [(Hop(1, 0), Hop(1, 0))] * stages,
        message_factors=(rows[0], rows[1]),
        record=True,
    )
    assert found.recordings is not None
    orders = [[ran.task for ran in recording.tasks] for recording in found.recordings]
    return Outcome(found.makespan, orders, found.peak_live)


def one_f_one_b_order(stage: int, depth: int, microbatches: int) -> list[Task]:
    """The order of Megatron's non-interleaved 1F1B on one stage."""
    warm_up = min(depth - stage - 1, microbatches)
    order = [Task(FORWARD, m) for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        order += [Task(FORWARD, m), Task(BACKWARD, m - warm_up)]
    return order + [Task(BACKWARD, m) for m in range(microbatches - warm_up, microbatches)]
