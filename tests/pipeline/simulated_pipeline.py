"""A pipeline of real arbiters under a discrete-event clock: what the property tests drive."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import Hint
from megatron_ext.pipeline.task import Direction, Task

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
Durations = Sequence[Sequence[float]]  # [stage][microbatch]


@dataclass
class Outcome:
    """What a simulated batch did."""

    makespan: float = 0
    orders: list[list[Task]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    finished: bool = False


def simulate(
    forward: Durations,
    backward: Durations,
    *,
    hint: Hint,
    limits: Sequence[int],
    latency: Callable[[Task], float] = lambda task: 0,
) -> Outcome:
    """Run one batch; messages take `latency` each and may overtake one another.

    Everything that happens at a time is known before a stage decides at that time.
    """
    depth, microbatches = len(forward), len(forward[0])
    arbiters = [
        Arbiter(
            num_microbatches=microbatches,
            live_limit=limits[stage],
            hint=hint,
            is_first_stage=stage == 0,
            is_last_stage=stage == depth - 1,
        )
        for stage in range(depth)
    ]
    outcome = Outcome(orders=[[] for _ in range(depth)])
    busy = [False] * depth
    events: list[tuple[float, int, str, int, Task]] = []
    serial = iter(range(10**9))

    def dispatch(now: float) -> None:
        for stage, arbiter in enumerate(arbiters):
            if busy[stage] or (task := arbiter.choose()) is None:
                continue
            busy[stage] = True
            outcome.orders[stage].append(task)
            times = forward if task.direction is FORWARD else backward
            end = now + times[stage][task.microbatch]
            heapq.heappush(events, (end, next(serial), "done", stage, task))

    dispatch(0)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, kind, stage, task = heapq.heappop(events)
            if kind == "arrival":
                arbiters[stage].arrived(task.direction, task.microbatch)
                continue
            busy[stage] = False
            arbiters[stage].completed(task)
            outcome.makespan = now
            neighbour = stage + 1 if task.direction is FORWARD else stage - 1
            if 0 <= neighbour < depth:
                arrival = now + latency(task)
                heapq.heappush(events, (arrival, next(serial), "arrival", neighbour, task))
        dispatch(now)
    outcome.peaks = [arbiter.peak_live for arbiter in arbiters]
    outcome.finished = all(arbiter.finished for arbiter in arbiters)
    return outcome


def one_f_one_b_order(stage: int, depth: int, microbatches: int) -> list[Task]:
    """The order of Megatron's non-interleaved 1F1B on one stage."""
    warm_up = min(depth - stage - 1, microbatches)
    order = [Task(FORWARD, m) for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        order += [Task(FORWARD, m), Task(BACKWARD, m - warm_up)]
    return order + [Task(BACKWARD, m) for m in range(microbatches - warm_up, microbatches)]
