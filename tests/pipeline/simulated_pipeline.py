"""A pipeline of real arbiters under a discrete-event clock: what the property tests drive."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import Hint, Place
from megatron_ext.pipeline.task import Direction, Kind, Task

FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
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
    hint: type[Hint],
    limits: Sequence[int],
    chunks: int = 1,
    weight_share: float = 0.5,
    latency: Callable[[Task], float] = lambda task: 0,
) -> Outcome:
    """Run one batch; messages take `latency` each and may overtake one another.

    Everything that happens at a time is known before a stage decides at that time. With a hint
    that splits off weight gradients they take `weight_share` of the backward's time.
    """
    depth, microbatches = len(forward), len(forward[0])
    arbiters = []
    for stage in range(depth):
        place = Place(stage, depth, microbatches, limits[stage], chunks)
        arbiters.append(Arbiter(place, hint(place)))
    outcome = Outcome(orders=[[] for _ in range(depth)])
    busy = [False] * depth
    events: list[tuple[float, int, str, int, Task]] = []
    serial = iter(range(10**9))

    def duration(stage: int, task: Task) -> float:
        if task.kind is FORWARD:
            return forward[stage][task.microbatch]
        whole = backward[stage][task.microbatch]
        if not hint.splits_weight:
            return whole
        return whole * (weight_share if task.kind is WEIGHT else 1 - weight_share)

    def dispatch(now: float) -> None:
        for stage, arbiter in enumerate(arbiters):
            if busy[stage] or (task := arbiter.choose()) is None:
                continue
            busy[stage] = True
            outcome.orders[stage].append(task)
            end = now + duration(stage, task)
            heapq.heappush(events, (end, next(serial), "done", stage, task))

    dispatch(0)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, event, stage, task = heapq.heappop(events)
            if event == "arrival":
                arbiters[stage].arrived(Direction(task.kind), task.microbatch, task.chunk)
                continue
            busy[stage] = False
            arbiters[stage].completed(task)
            outcome.makespan = now
            if receiver := _receiver(stage, task, depth, chunks):
                neighbour, needed = receiver
                arrival = now + latency(task)
                heapq.heappush(events, (arrival, next(serial), "arrival", neighbour, needed))
        dispatch(now)
    outcome.peaks = [arbiter.peak_live for arbiter in arbiters]
    outcome.finished = all(arbiter.finished for arbiter in arbiters)
    return outcome


def _receiver(stage: int, task: Task, depth: int, chunks: int) -> tuple[int, Task] | None:
    """The stage and task that need the result of `task`."""
    if task.kind is WEIGHT:
        return None
    step = 1 if task.kind is FORWARD else -1
    virtual = task.chunk * depth + stage + step
    if not 0 <= virtual < depth * chunks:
        return None
    return virtual % depth, task._replace(chunk=virtual // depth)


def one_f_one_b_order(stage: int, depth: int, microbatches: int) -> list[Task]:
    """The order of Megatron's non-interleaved 1F1B on one stage."""
    warm_up = min(depth - stage - 1, microbatches)
    order = [Task(FORWARD, m) for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        order += [Task(FORWARD, m), Task(BACKWARD, m - warm_up)]
    return order + [Task(BACKWARD, m) for m in range(microbatches - warm_up, microbatches)]
