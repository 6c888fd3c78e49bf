"""The real arbiter where the pipeline does not drain: batches overlap, updates come between."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import HINTS, Place
from megatron_ext.pipeline.task import Direction, Kind, Task

READINESS_DRIVEN = [name for name, hint in HINTS.items() if not hint.fixed_order]
FORWARD, BACKWARD, WEIGHT, UPDATE = Kind


class Stage:
    """One stage: batch after batch, each at most one ahead of the one that is to end."""

    def __init__(self, place: Place, hint: str, batches: int, hold_backwards: bool) -> None:
        self.place = place
        self.batches, self.hold_backwards = batches, hold_backwards
        self.arbiter = Arbiter(place, HINTS[hint](place))
        self.batch = -1
        self.waiting: list[tuple[Direction, int, int]] = []
        self.order: list[Task] = []
        self.told = False
        self.next_batch()

    def next_batch(self) -> None:
        self.batch += 1
        self.told = False
        size = self.place.microbatches
        self.arbiter.must_end((self.batch + 1) * size, self.hold_backwards)
        if self.batch + 1 < self.batches:
            self.arbiter.extend(size)
        early, self.waiting = self.waiting, []
        for message in early:
            self.receive(*message)

    def receive(self, direction: Direction, microbatch: int, chunk: int) -> None:
        if microbatch >= self.arbiter.end:
            self.waiting.append((direction, microbatch, chunk))
        else:
            self.arbiter.arrived(direction, microbatch, chunk)

    @property
    def done(self) -> bool:
        return self.batch == self.batches


@given(
    depth=st.integers(1, 4),
    chunks=st.integers(1, 2),
    microbatches=st.integers(1, 5),
    limit=st.integers(1, 8),
    batches=st.integers(1, 4),
    hint=st.sampled_from(READINESS_DRIVEN),
    hold_backwards=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_finishes_bounded_and_on_its_versions(
    depth: int,
    chunks: int,
    microbatches: int,
    limit: int,
    batches: int,
    hint: str,
    hold_backwards: bool,
    seed: int,
) -> None:
    """Stages step in random order and messages take any time.

    With two gradient buffers an update waits for all stages, with one only for its own.
    """
    chance = random.Random(seed)
    stages = [
        Stage(Place(i, depth, microbatches, limit, chunks), hint, batches, hold_backwards)
        for i in range(depth)
    ]
    mail: list[tuple[int, Direction, int, int]] = []
    updated = [0] * depth
    steps = 0
    while not all(stage.done for stage in stages):
        steps += 1
        assert steps < 60_000, "no progress"
        if mail and chance.random() < 0.5:
            to, *message = mail.pop(chance.randrange(len(mail)))
            stages[to].receive(*message)
            continue
        number = chance.randrange(depth)
        stage = stages[number]
        if stage.done:
            continue
        waits_for = [stage] if hold_backwards else stages
        if not stage.told and all(
            other.done or other.batch > stage.batch or other.arbiter.ended for other in waits_for
        ):
            stage.told = True
            stage.arbiter.updated()
        task = stage.arbiter.choose()
        if task is None:
            continue
        if task.kind is UPDATE:
            stage.arbiter.completed(task)
            pieces = HINTS[hint].weight_pieces if HINTS[hint].splits_weight else 0
            assert _count(stage, stage.batch) == (2 + pieces) * microbatches * chunks
            updated[number] += 1
            if stage.batch + 1 < batches:
                stage.next_batch()
            else:
                stage.batch += 1
            continue
        batch = task.microbatch // microbatches
        assert batch - updated[number] in (0, 1), "two versions are not enough for this"
        if hold_backwards and task.kind is BACKWARD:
            assert batch == updated[number]
        stage.order.append(task)
        stage.arbiter.completed(task)
        assert stage.arbiter.live <= limit * chunks
        message = _sent(task, number, depth, chunks)
        if message is not None:
            mail.append(message)
    for stage in stages:
        _check_order(stage, microbatches * batches, HINTS[hint].weight_pieces)


def _count(stage: Stage, batch: int) -> int:
    size = stage.place.microbatches
    return sum(task.microbatch // size == batch for task in stage.order)


def _sent(
    task: Task, stage: int, depth: int, chunks: int
) -> tuple[int, Direction, int, int] | None:
    """Who gets a task's result: the next model chunk is on the next stage, going round."""
    if task.kind is WEIGHT:
        return None
    step = 1 if task.kind is FORWARD else -1
    position = task.chunk * depth + stage + step
    if not 0 <= position < depth * chunks:
        return None
    return position % depth, Direction(task.kind), task.microbatch, position // depth


def _check_order(stage: Stage, total: int, pieces: int) -> None:
    seen: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    for task in stage.order:
        seen[task.kind, task.chunk].append(task.microbatch)
    for (kind, _), numbers in seen.items():
        assert numbers == [m for m in range(total) for _ in range(pieces if kind is WEIGHT else 1)]
