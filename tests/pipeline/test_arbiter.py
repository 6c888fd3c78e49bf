"""Properties of the real arbiter, alone and in simulated pipelines."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import HINTS, Place
from megatron_ext.pipeline.task import Direction, Kind, Task
from tests.pipeline.simulated_pipeline import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Outcome,
    one_f_one_b_order,
    simulate,
)

MOST_DEPTH, MOST_MICROBATCHES = 8, 20

depths = st.integers(1, MOST_DEPTH)
microbatch_counts = st.integers(1, MOST_MICROBATCHES)
times = st.integers(1, 50)


@st.composite
def durations(draw: st.DrawFn, depth: int, microbatches: int) -> list[list[int]]:
    row = st.lists(times, min_size=microbatches, max_size=microbatches)
    return draw(st.lists(row, min_size=depth, max_size=depth))


@dataclass(frozen=True)
class Case:
    """A pipeline, its task times and what the user set."""

    forward: list[list[int]]
    backward: list[list[int]]
    limit: int
    chunks: int
    hint: str

    @property
    def depth(self) -> int:
        return len(self.forward)

    @property
    def microbatches(self) -> int:
        return len(self.forward[0])


@st.composite
def cases(draw: st.DrawFn, hints: st.SearchStrategy[str], most_chunks: int = 3) -> Case:
    depth, microbatches = draw(depths), draw(microbatch_counts)
    chunks = draw(st.integers(1, most_chunks)) if depth > 1 else 1
    forward = draw(durations(depth, microbatches))
    backward = draw(durations(depth, microbatches))
    return Case(forward, backward, draw(st.integers(1, 2 * depth)), chunks, draw(hints))


READINESS_DRIVEN = [name for name, hint in HINTS.items() if not hint.fixed_order]


def check_complete_and_ordered(outcome: Outcome, case: Case) -> None:
    hint = HINTS[case.hint]
    times = {FORWARD: 1, BACKWARD: 1} | ({WEIGHT: hint.weight_pieces} if hint.splits_weight else {})
    for order in outcome.orders:
        assert len(order) == sum(times.values()) * case.chunks * case.microbatches
        for kind, pieces in times.items():
            for chunk in range(case.chunks):
                done = [t.microbatch for t in order if (t.kind, t.chunk) == (kind, chunk)]
                assert done == [m for m in range(case.microbatches) for _ in range(pieces)]


@given(
    cases(st.sampled_from(READINESS_DRIVEN)),
    st.lists(st.integers(0, 100), min_size=1, max_size=30),
)
@settings(max_examples=400, deadline=None)
def test_finishes_bounded_and_ordered(case: Case, latencies: list[int]) -> None:
    drawn = itertools.cycle(latencies)
    outcome = simulate(
        case.forward,
        case.backward,
        hint=HINTS[case.hint],
        limits=[case.limit] * case.depth,
        chunks=case.chunks,
        latency=lambda: next(drawn),
    )
    check_complete_and_ordered(outcome, case)
    assert max(outcome.peaks) <= case.limit * case.chunks


@given(cases(st.just("1f1b")), st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_the_fixed_order_finishes_too(case: Case, latency: int) -> None:
    assume(case.chunks == 1 or case.microbatches % case.depth == 0)
    outcome = simulate(
        case.forward,
        case.backward,
        hint=HINTS["1f1b"],
        limits=[case.limit] * case.depth,
        chunks=case.chunks,
        latency=lambda: latency,
    )
    check_complete_and_ordered(outcome, case)
    if case.chunks == 1:
        assert max(outcome.peaks) <= case.limit


@given(depths, microbatch_counts, times, times, st.sampled_from(["bf", "1f1b"]))
@settings(max_examples=200, deadline=None)
def test_without_jitter_and_latency_the_order_is_1f1b(
    depth: int, microbatches: int, forward_time: int, backward_time: int, hint: str
) -> None:
    own = [depth - stage for stage in range(depth)]  # 1F1B's own depth on every stage
    outcome = simulate(
        [[forward_time] * microbatches] * depth,
        [[backward_time] * microbatches] * depth,
        hint=HINTS[hint],
        limits=own if hint == "bf" else [depth] * depth,
    )
    for stage, order in enumerate(outcome.orders):
        assert order == one_f_one_b_order(stage, depth, microbatches)


@given(depths, microbatch_counts, times, times, st.integers(2, 4))
@settings(max_examples=200, deadline=None)
def test_with_room_and_without_jitter_it_is_as_fast_as_1f1b(
    depth: int, microbatches: int, forward_time: int, backward_time: int, multiple: int
) -> None:
    outcome = simulate(
        [[forward_time] * microbatches] * depth,
        [[backward_time] * microbatches] * depth,
        hint=HINTS["bf"],
        limits=[multiple * depth] * depth,
    )
    assert outcome.makespan == (microbatches + depth - 1) * (forward_time + backward_time)


@given(cases(st.just("bf"), most_chunks=1))
@settings(max_examples=500, deadline=None)
def test_theorem_6_1(case: Case) -> None:
    """RRFP, Theorem 6.1: without limit and latency BF is no slower than the bound."""
    forward, backward, microbatches = case.forward, case.backward, case.microbatches
    outcome = simulate(forward, backward, hint=HINTS["bf"], limits=[microbatches] * case.depth)
    slack_forward = sum(
        max(row[j] for row in forward) - forward[-1][j] for j in range(1, microbatches)
    )
    slack_backward = sum(
        max(row[j] for row in backward) - backward[-1][j] for j in range(microbatches - 1)
    )
    bound = (
        flow_shop_makespan(forward)
        + flow_shop_makespan(backward[::-1])
        + slack_forward
        + slack_backward
    )
    assert outcome.makespan <= bound


@pytest.mark.parametrize("hint", ["bfw", "bfw-depth"])
def test_bounded_weight_gradients_beat_1f1b_at_its_own_memory(hint: str) -> None:
    depth, microbatches, sigma = 8, 64, 0.3
    generator = np.random.default_rng(0)
    shape = (depth, microbatches)
    forward = generator.lognormal(-(sigma**2) / 2, sigma, shape).tolist()
    backward = (2 * generator.lognormal(-(sigma**2) / 2, sigma, shape)).tolist()
    fixed, split = (
        simulate(forward, backward, hint=HINTS[name], limits=[depth] * depth)
        for name in ("1f1b", hint)
    )
    assert max(split.peaks) <= depth == max(fixed.peaks)
    assert fixed.makespan / split.makespan > 1.15


def flow_shop_makespan(stages: list[list[int]]) -> int:
    """Makespan of one direction alone: microbatches in order through stages in order."""
    ends = [0] * len(stages[0])
    for row in stages:
        free = 0
        for j, duration in enumerate(row):
            free = ends[j] = max(free, ends[j]) + duration
    return ends[-1]


def test_the_live_limit_binds() -> None:
    # Backwards are slow here, so a stage with more room would run ahead.
    outcome = simulate([[1] * 12] * 4, [[9] * 12] * 4, hint=HINTS["bf"], limits=[2] * 4)
    assert outcome.peaks == [2, 2, 2, 1]


def test_deferred_weight_gradients_count_as_live() -> None:
    # The last stage is never idle; unbounded it would defer every weight gradient to the end.
    outcome = simulate([[1] * 12] * 2, [[2] * 12] * 2, hint=HINTS["bfw"], limits=[3] * 2)
    assert outcome.peaks[-1] == 3
    kinds = [task.kind for task in outcome.orders[-1]]
    assert WEIGHT in kinds[:10]


class MiddleStage(RuleBasedStateMachine):
    """One stage between two that do whatever they like, as far as the protocol lets them."""

    microbatches, limit, chunks = 5, 2, 2

    @initialize(hint=st.sampled_from(READINESS_DRIVEN))
    def begin(self, hint: str) -> None:
        place = Place(1, 3, self.microbatches, self.limit, self.chunks)
        self.splits = HINTS[hint].splits_weight
        self.pieces = self.pieces_left = HINTS[hint].weight_pieces
        self.arbiter = Arbiter(place, HINTS[hint](place))
        self.arrived: set[Task] = set()
        self.done: dict[tuple[Kind, int], int] = {
            (kind, chunk): 0 for kind in (FORWARD, BACKWARD, WEIGHT) for chunk in range(self.chunks)
        }

    @rule(
        kind=st.sampled_from([FORWARD, BACKWARD]),
        microbatch=st.integers(0, microbatches - 1),
        chunk=st.integers(0, chunks - 1),
    )
    def a_message_arrives(self, kind: Kind, microbatch: int, chunk: int) -> None:
        task = Task(kind, microbatch, chunk)
        if kind is BACKWARD and microbatch >= self.done[FORWARD, chunk]:
            return  # not sent before the activation was
        if kind is FORWARD and chunk and microbatch >= self.done[FORWARD, chunk - 1]:
            return
        if task not in self.arrived:
            self.arrived.add(task)
            self.arbiter.arrived(Direction(kind), microbatch, chunk)

    @precondition(lambda self: self.arbiter.choose() is not None)
    @rule()
    def run(self) -> None:
        task = self.arbiter.choose()
        assert task is not None
        kind, microbatch, chunk = task
        assert microbatch == self.done[kind, chunk]
        if kind is WEIGHT:
            assert self.splits
            assert microbatch < self.done[BACKWARD, chunk]
            self.pieces_left = (self.pieces_left - 1) or self.pieces
        else:
            assert task in self.arrived
        self.arbiter.completed(task)
        self.done[kind, chunk] += kind is not WEIGHT or self.pieces_left == self.pieces

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        total = {kind: sum(self.done[kind, c] for c in range(self.chunks)) for kind, _ in self.done}
        live = total[FORWARD] - total[WEIGHT if self.splits else BACKWARD]
        assert self.arbiter.live == live <= self.limit * self.chunks
        finished = total[WEIGHT if self.splits else BACKWARD] == self.microbatches * self.chunks
        assert self.arbiter.finished == finished
        stuck = self.arbiter.choose() is None and not finished
        backward_ready = any(
            Task(BACKWARD, self.done[BACKWARD, c], c) in self.arrived for c in range(self.chunks)
        )
        if stuck:
            assert not backward_ready
            assert not (self.splits and total[BACKWARD] > total[WEIGHT])
            assert self.arbiter.awaited()


TestMiddleStage = MiddleStage.TestCase


def make_arbiter(
    stage: int = 1, depth: int = 3, chunks: int = 1, *, forward_only: bool = False
) -> Arbiter:
    place = Place(stage, depth, microbatches=4, live_limit=2, chunks=chunks)
    return Arbiter(place, HINTS["bf"](place), forward_only=forward_only)


@pytest.mark.parametrize(
    ("arbiter", "direction", "microbatch", "chunk"),
    [
        (make_arbiter(), Direction.FORWARD, 4, 0),
        (make_arbiter(), Direction.FORWARD, 0, 1),
        (make_arbiter(stage=0), Direction.FORWARD, 0, 0),
        (make_arbiter(stage=2), Direction.BACKWARD, 0, 0),
        (make_arbiter(stage=2, chunks=2), Direction.BACKWARD, 0, 1),
        (make_arbiter(forward_only=True), Direction.BACKWARD, 0, 0),
    ],
)
def test_unexpected_arrivals_are_refused(
    arbiter: Arbiter, direction: Direction, microbatch: int, chunk: int
) -> None:
    with pytest.raises(ValueError, match=f"unexpected {direction.payload} of microbatch"):
        arbiter.arrived(direction, microbatch, chunk)


def test_an_arrival_counts_once() -> None:
    arbiter = make_arbiter()
    arbiter.arrived(Direction.FORWARD, 0)
    with pytest.raises(ValueError, match="unexpected activation of microbatch 0"):
        arbiter.arrived(Direction.FORWARD, 0)
    arbiter.completed(Task(FORWARD, 0))
    with pytest.raises(ValueError, match="unexpected activation of microbatch 0"):
        arbiter.arrived(Direction.FORWARD, 0)


def test_a_forward_only_batch_holds_outputs_until_they_are_taken() -> None:
    arbiter = make_arbiter(stage=0, forward_only=True)
    for microbatch in range(2):
        assert arbiter.choose() == Task(FORWARD, microbatch)
        arbiter.completed(Task(FORWARD, microbatch))
    assert arbiter.choose() is None
    assert arbiter.awaited() == []
    arbiter.released(1)
    assert arbiter.choose() == Task(FORWARD, 2)


def test_awaited_names_what_is_missing() -> None:
    arbiter = make_arbiter()
    assert arbiter.awaited() == [Task(FORWARD, 0)]
    for microbatch in range(2):
        arbiter.arrived(Direction.FORWARD, microbatch)
        arbiter.completed(Task(FORWARD, microbatch))
    assert arbiter.awaited() == [Task(BACKWARD, 0)]  # the limit forbids another forward


def test_weight_gradients_of_an_ended_batch_wait_until_the_next_is_half_in() -> None:
    place = Place(0, 2, microbatches=4, live_limit=20)
    arbiter = Arbiter(place, HINTS["bfw-depth"](place))
    arbiter.must_end(4)
    arbiter.extend(4)
    for microbatch in range(4):
        arbiter.completed(Task(FORWARD, microbatch))
        arbiter.arrived(Direction.BACKWARD, microbatch)
    for microbatch in range(4):
        arbiter.completed(Task(BACKWARD, microbatch))
    for microbatch in (4, 5):
        assert arbiter.choose() == Task(FORWARD, microbatch)
        arbiter.completed(Task(FORWARD, microbatch))
    for microbatch in range(4):
        assert not arbiter.ended
        assert arbiter.choose() == Task(WEIGHT, microbatch)
        arbiter.completed(Task(WEIGHT, microbatch))
    assert arbiter.ended
    assert arbiter.choose() == Task(FORWARD, 6)


def test_one_gradient_buffer_lets_them_wait_for_nothing() -> None:
    place = Place(0, 2, microbatches=1, live_limit=20)
    arbiter = Arbiter(place, HINTS["bfw-depth"](place))
    arbiter.must_end(1, hold_backwards=True)
    arbiter.extend(1)
    arbiter.completed(Task(FORWARD, 0))
    arbiter.arrived(Direction.BACKWARD, 0)
    arbiter.completed(Task(BACKWARD, 0))
    assert arbiter.choose() == Task(WEIGHT, 0)
