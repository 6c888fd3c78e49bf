"""The simulation against closed formulas, a proven optimum, and its own books."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.pipeline.hints import Hint, ReadySet
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.simulate import engine
from megatron_ext.simulate.floors import busiest_stage, critical_path
from megatron_ext.simulate.jitter_law import JitterLaw
from megatron_ext.simulate.job import Job
from megatron_ext.simulate.network import Hop, Network
from megatron_ext.simulate.outcome import Cause, Outcome
from megatron_ext.simulate.pipeline import Clipping, Pipeline, Policy
from megatron_ext.simulate.schedules import SCHEDULES
from megatron_ext.simulate.task_times import MeanTimes, TaskTimes
from tests.simulate.optimum import best_makespan

times = st.floats(0.01, 50)


def job(pipeline: Pipeline, forward: float = 1, backward: float = 2, **other: object) -> Job:
    law, network = (
        other.pop(name, default) for name, default in (("law", JitterLaw()), ("network", Network()))
    )
    assert not other
    return Job(pipeline, MeanTimes.of(pipeline, [forward], [backward]), law, network)


def run(job: Job, hint: str, limit: str | None = None, seed: int = 0, **policy: object) -> Outcome:
    return job.run(job.draw(seed), Policy(hint, limit, **policy), record=True)


@given(st.integers(1, 8), st.integers(1, 20), times, times)
@settings(max_examples=60, deadline=None)
def test_1f1b_and_gpipe_take_the_textbook_time(p: int, m: int, f: float, b: float) -> None:
    expected = (m + p - 1) * (f + b)
    for hint in ("1f1b", "gpipe"):
        outcome = run(job(Pipeline(p, m), f, b), hint)
        assert outcome.makespan == pytest.approx(expected, rel=1e-9)
    assert max(outcome.peak_live) == m


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 3), times, times)
@settings(max_examples=60, deadline=None)
def test_interleaved_1f1b_takes_the_textbook_time(
    p: int, groups: int, chunks: int, f: float, b: float
) -> None:
    pipeline = Pipeline(p, groups * p, chunks)
    outcome = run(job(pipeline, f, b), "1f1b")
    assert outcome.makespan == pytest.approx((groups * p * chunks + p - 1) * (f + b), rel=1e-9)


small = st.integers(1, 9)


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[list[list[int]]], int, int]:
    p, m = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    row = st.lists(small, min_size=m, max_size=m)
    tables = [draw(st.lists(row, min_size=p, max_size=p)) for _ in range(3)]
    return tables, draw(st.integers(1, 4)), draw(st.integers(0, 3))


@given(small_cases())
@settings(max_examples=25, deadline=None)
def test_no_hint_beats_the_optimum(case: tuple[list[list[list[int]]], int, int]) -> None:
    (forward, backward, weight), limit, latency = case
    p, m = len(forward), len(forward[0])
    f, b, w = (np.array(table, dtype=float) for table in (forward, backward, weight))
    given_times = TaskTimes(f, b + w, w)
    whole = (b + w).astype(int).tolist()
    pipeline, hops = Pipeline(p, m), [(Hop(latency, 0), Hop(latency, 0))] * p
    optimum = {
        True: best_makespan(forward, backward, weight, limit=limit, latency=latency),
        False: best_makespan(forward, whole, None, limit=limit, latency=latency),
    }
    unlimited = best_makespan(forward, whole, None, limit=m, latency=latency)
    for name, hint in SCHEDULES.items():
        outcome = engine.simulate(pipeline, given_times, Policy(name, str(limit)), hops)
        best = unlimited if name == "gpipe" else optimum[hint.splits_weight]
        assert outcome.makespan >= best
        assert outcome.makespan >= busiest_stage(pipeline, given_times)
        assert outcome.makespan >= critical_path(pipeline, given_times, hops)
    if p == 1:  # nothing to wait for
        assert outcome.makespan == best


def test_gap_to_the_optimum_is_small_where_there_is_room() -> None:
    generator = np.random.default_rng(0)
    gaps = []
    for _ in range(6):
        f, b, w = (generator.integers(3, 9, (3, 4)).astype(float) for _ in range(3))
        tables = [table.astype(int).tolist() for table in (f, b, w)]
        best = best_makespan(*tables, limit=4)
        pipeline = Pipeline(3, 4)
        outcome = engine.simulate(
            pipeline, TaskTimes(f, b + w, w), Policy("bfw-depth", "4"), [(Hop(0, 0),) * 2] * 3
        )
        gaps.append(outcome.makespan / best)
    assert 1 <= np.mean(gaps) < 1.08


POLICIES = [
    ("bfw-depth", "p", False),
    ("bf", "2p", False),
    ("1f1b", "p", False),
    ("gpipe", None, False),
    ("bfw", "1.5p", True),
    ("1f1b", "p", True),
]
BUSY_JOB = job(
    Pipeline(
        4, 12, iterations=3, replicas=2, tensor_parallel=2, update=1.5, reduction=0.7,
        norm_latency=0.2, task_overhead=0.05, agreement=0.02,
    ),
    law=JitterLaw.parse("lognormal:0.4+slow-nodes:0.3,1.5+messages:0.5+slow-links:0.2,3"),
    network=Network(latency=0.3, message_size=1, bandwidth=8, ranks_per_node=4),
)  # fmt: skip


@pytest.mark.parametrize(("hint", "limit", "continuous"), POLICIES)
@pytest.mark.parametrize("clipping", Clipping)
def test_every_moment_of_a_stage_is_accounted_for(
    hint: str, limit: str | None, continuous: bool, clipping: Clipping
) -> None:
    outcome = run(BUSY_JOB, hint, limit, pipedream_2bw=continuous, clipping=clipping)
    for busy, idle in zip(outcome.busy, outcome.idle, strict=True):
        assert min(idle) >= 0
        assert busy + sum(idle) == pytest.approx(outcome.makespan, rel=1e-9)
    assert outcome.idle_by_cause["update"] >= 3 * 1.5 - 1e-9


def test_causes_of_waits() -> None:
    # Equal stages: 1F1B fills, drains, and in between waits for gradients alone.
    pipeline = Pipeline(4, 8)
    idle = run(job(pipeline), "1f1b").idle
    assert [stage[Cause.FILL] for stage in idle] == [0, 1, 2, 3]
    assert idle[3][Cause.DRAIN] == 6
    assert sum(idle[0]) == 9
    assert idle[0][Cause.FORWARD] == 0
    # One microbatch at a time: whoever waits, waits for room.
    tight = run(job(pipeline), "bf", "1").idle
    assert tight[0][Cause.MEMORY] > 20
    assert run(job(pipeline), "bf", "9").idle[0][Cause.MEMORY] == 0


@pytest.mark.parametrize("hint", ["bfw-depth", "bf", "1f1b"])
def test_2bw_keeps_versions_and_one_step_of_delay(hint: str) -> None:
    outcome = run(BUSY_JOB, hint, "p", pipedream_2bw=True)
    assert outcome.recordings is not None
    for recording in outcome.recordings:
        ends = [end for _, end in recording.updates]
        assert len(ends) == 3
        for ran in recording.tasks:
            if ran.task.kind is Kind.FORWARD and ran.task.microbatch >= 24:
                assert ran.started >= ends[0]
    crossing = [ran.task.microbatch // 12 for ran in outcome.recordings[0].tasks]
    assert any(later < earlier for earlier, later in itertools.pairwise(crossing))


@given(
    st.sampled_from([name for name, hint in SCHEDULES.items() if not hint.fixed_order]),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 10),
    st.sampled_from(list(Clipping)),
    st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_2bw_ends_under_any_hint_limit_and_delay(
    hint: str,
    stages: int,
    microbatches: int,
    iterations: int,
    chunks: int,
    limit: int,
    clipping: Clipping,
    seed: int,
) -> None:
    pipeline = Pipeline(
        stages, microbatches, chunks, iterations, update=0.5, reduction=1, norm_latency=0.2
    )
    noisy = job(pipeline, law=JitterLaw(sigma=0.8, messages=0.8), network=Network(latency=1))
    outcome = run(noisy, hint, str(limit), seed, pipedream_2bw=True, clipping=clipping)
    assert max(outcome.peak_live) <= limit * chunks


def test_an_update_with_exact_clipping_waits_for_all_stages() -> None:
    ends = {}
    for clipping in (Clipping.EXACT, Clipping.STAGE):
        outcome = run(BUSY_JOB, "bf", "p", clipping=clipping)
        assert outcome.recordings is not None
        ends[clipping] = [recording.updates[0][0] for recording in outcome.recordings]
    assert len(set(ends[Clipping.EXACT])) == 1
    assert len(set(ends[Clipping.STAGE])) == 4  # stages; replicas reduce together
    assert max(ends[Clipping.STAGE]) <= ends[Clipping.EXACT][0]


@pytest.mark.parametrize("hint", ["bf", "bfw-depth", "1f1b"])
def test_a_flushed_run_is_its_batches_one_after_the_other(hint: str) -> None:
    law, network = JitterLaw(sigma=0.5), Network(latency=0.4)
    whole = job(Pipeline(4, 6, iterations=3), law=law, network=network)
    draw = whole.draw(3)
    together = whole.run(draw, Policy(hint, "p"))
    parts = 0.0
    for first in (0, 6, 12):
        span = slice(first, first + 6)
        part = TaskTimes(
            draw.times.forward[:, span], draw.times.backward[:, span], draw.times.weight[:, span]
        )
        parts += engine.simulate(Pipeline(4, 6), part, Policy(hint, "p"), draw.hops).makespan
    assert together.makespan == pytest.approx(parts, rel=1e-12)


def test_blocking_messages_cost_the_sender_time() -> None:
    pipeline = Pipeline(4, 16)
    free = run(job(pipeline, network=Network(latency=0.2)), "1f1b")
    blocking = run(job(pipeline, network=Network(latency=0.2, blocking=True)), "1f1b")
    assert blocking.makespan > free.makespan
    assert blocking.idle[1][Cause.MESSAGE] == pytest.approx(2 * 16 * 0.2)


def test_a_link_carries_one_message_after_the_other() -> None:
    slow = Network(message_size=1, bandwidth=0.1)
    outcome = run(job(Pipeline(2, 5), network=slow), "f-priority", "5")
    assert outcome.recordings is not None
    arrivals = [message.at for message in outcome.recordings[1].arrived]
    assert arrivals == pytest.approx([11, 21, 31, 41, 51])


def test_unequal_stages_and_a_slow_one() -> None:
    pipeline = Pipeline(3, 30)
    means = MeanTimes.of(pipeline, [1, 1, 4], [2, 2, 8])
    outcome = run(Job(pipeline, means), "bf", "2p")
    assert outcome.makespan == pytest.approx(2 + 30 * 12 + 4, rel=1e-9)


class Lazy(Hint):
    """Never runs a backward."""

    def choose(self, ready: ReadySet) -> Task | None:
        return ready.forward


def test_a_hint_that_stalls_is_reported() -> None:
    from megatron_ext.errors import PipelineError

    with pytest.raises(
        PipelineError, match=r"Lazy chose no task .* stage 0 stalled in iteration 1"
    ):
        run(job(Pipeline(2, 4)), f"{__name__}:Lazy")
