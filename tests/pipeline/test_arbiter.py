"""Properties of the real arbiter, alone and in simulated pipelines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import HINTS
from megatron_ext.pipeline.task import Direction, Task
from tests.pipeline.simulated_pipeline import (
    BACKWARD,
    FORWARD,
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


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], int]:
    depth, microbatches = draw(depths), draw(microbatch_counts)
    forward = draw(durations(depth, microbatches))
    backward = draw(durations(depth, microbatches))
    return forward, backward, draw(st.integers(1, 2 * depth))


def check_complete_and_ordered(outcome: Outcome, microbatches: int) -> None:
    assert outcome.finished
    for order in outcome.orders:
        for direction in Direction:
            done = [task.microbatch for task in order if task.direction is direction]
            assert done == list(range(microbatches))


@given(pipelines(), st.lists(st.integers(0, 100), min_size=1, max_size=30))
@settings(max_examples=300, deadline=None)
def test_finishes_bounded_and_ordered(
    pipeline: tuple[list[list[int]], list[list[int]], int], latencies: list[int]
) -> None:
    forward, backward, limit = pipeline
    drawn = iter(latencies * (4 * MOST_DEPTH * MOST_MICROBATCHES))
    outcome = simulate(
        forward,
        backward,
        hint=HINTS["bf"],
        limits=[limit] * len(forward),
        latency=lambda task: next(drawn),
    )
    check_complete_and_ordered(outcome, len(forward[0]))
    assert max(outcome.peaks) <= limit


@given(depths, microbatch_counts, times, times)
@settings(max_examples=200, deadline=None)
def test_without_jitter_and_latency_the_order_is_1f1b(
    depth: int, microbatches: int, forward_time: int, backward_time: int
) -> None:
    outcome = simulate(
        [[forward_time] * microbatches] * depth,
        [[backward_time] * microbatches] * depth,
        hint=HINTS["bf"],
        limits=[depth - stage for stage in range(depth)],  # 1F1B's own depth on every stage
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


@given(pipelines())
@settings(max_examples=500, deadline=None)
def test_theorem_6_1(pipeline: tuple[list[list[int]], list[list[int]], int]) -> None:
    """RRFP, Theorem 6.1: without limit and latency BF is no slower than the bound."""
    forward, backward, _ = pipeline
    depth, microbatches = len(forward), len(forward[0])
    outcome = simulate(forward, backward, hint=HINTS["bf"], limits=[microbatches] * depth)
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


class MiddleStage(RuleBasedStateMachine):
    """One stage between two that do whatever they like, as far as the protocol lets them."""

    microbatches, limit = 7, 3

    def __init__(self) -> None:
        super().__init__()
        self.arbiter = Arbiter(
            num_microbatches=self.microbatches,
            live_limit=self.limit,
            hint=HINTS["bf"],
            is_first_stage=False,
            is_last_stage=False,
        )
        self.arrived: dict[Direction, set[int]] = {FORWARD: set(), BACKWARD: set()}
        self.done: dict[Direction, int] = {FORWARD: 0, BACKWARD: 0}

    @rule(microbatch=st.integers(0, microbatches - 1))
    def activation_arrives(self, microbatch: int) -> None:
        if microbatch not in self.arrived[FORWARD]:
            self.arrived[FORWARD].add(microbatch)
            self.arbiter.arrived(FORWARD, microbatch)

    @rule(microbatch=st.integers(0, microbatches - 1))
    def gradient_arrives(self, microbatch: int) -> None:
        sent = microbatch < self.done[FORWARD]
        if sent and microbatch not in self.arrived[BACKWARD]:
            self.arrived[BACKWARD].add(microbatch)
            self.arbiter.arrived(BACKWARD, microbatch)

    @precondition(lambda self: self.arbiter.choose() is not None)
    @rule()
    def run(self) -> None:
        task = self.arbiter.choose()
        assert task is not None
        assert task.microbatch == self.done[task.direction]
        assert task.microbatch in self.arrived[task.direction]
        self.arbiter.completed(task)
        self.done[task.direction] += 1

    @invariant()
    def agrees_with_the_model(self) -> None:
        live = self.done[FORWARD] - self.done[BACKWARD]
        assert self.arbiter.live == live <= self.limit
        forward_ready = self.done[FORWARD] in self.arrived[FORWARD] and live < self.limit
        backward_ready = self.done[BACKWARD] in self.arrived[BACKWARD]
        assert (self.arbiter.choose() is not None) == (forward_ready or backward_ready)
        assert self.arbiter.finished == (self.done[BACKWARD] == self.microbatches)
        if not (forward_ready or backward_ready or self.arbiter.finished):
            assert self.arbiter.awaited()


TestMiddleStage = MiddleStage.TestCase


def make_arbiter(**changes: object) -> Arbiter:
    arguments: dict[str, object] = {
        "num_microbatches": 4,
        "live_limit": 2,
        "hint": HINTS["bf"],
        "is_first_stage": False,
        "is_last_stage": False,
    }
    return Arbiter(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "direction", "microbatch"),
    [
        ({}, FORWARD, 4),
        ({"is_first_stage": True}, FORWARD, 0),
        ({"is_last_stage": True}, BACKWARD, 0),
        ({"forward_only": True}, BACKWARD, 0),
    ],
)
def test_unexpected_arrivals_are_refused(
    changes: dict[str, object], direction: Direction, microbatch: int
) -> None:
    with pytest.raises(ValueError, match=f"unexpected {direction.payload} of microbatch"):
        make_arbiter(**changes).arrived(direction, microbatch)


def test_an_arrival_counts_once() -> None:
    arbiter = make_arbiter()
    arbiter.arrived(FORWARD, 0)
    with pytest.raises(ValueError, match="unexpected activation of microbatch 0"):
        arbiter.arrived(FORWARD, 0)
    arbiter.completed(Task(FORWARD, 0))
    with pytest.raises(ValueError, match="unexpected activation of microbatch 0"):
        arbiter.arrived(FORWARD, 0)


def test_a_forward_only_batch_holds_outputs_until_they_are_taken() -> None:
    arbiter = make_arbiter(is_first_stage=True, forward_only=True)
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
        arbiter.arrived(FORWARD, microbatch)
        arbiter.completed(Task(FORWARD, microbatch))
    assert arbiter.awaited() == [Task(BACKWARD, 0)]  # the limit forbids another forward
