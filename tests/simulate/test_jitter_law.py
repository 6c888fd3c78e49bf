"""Laws of jitter: their means, what is refused, and where they act."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.jitter import LEVELS
from megatron_ext.simulate.jitter_law import JitterLaw
from megatron_ext.simulate.network import Network
from megatron_ext.simulate.pipeline import Pipeline
from megatron_ext.simulate.task_times import MeanTimes, draw_times

PIPELINE = Pipeline(8, 64)
MEANS = MeanTimes.of(PIPELINE, [1], [2])


@pytest.mark.parametrize("text", ["lognormal:0.5", "pareto:3", "lengths:0.4", "none"])
def test_factors_have_mean_one(text: str) -> None:
    law = JitterLaw.parse(text)
    generator = np.random.default_rng(0)
    factors = law.factors(generator, (200, 2000)) * law.length_factors(generator, 2000)
    assert factors.min() > 0
    assert factors.mean() == pytest.approx(1, rel=0.02)
    assert bool(factors.std() > 0.1) == (text != "none")


def test_laws_combine() -> None:
    law = JitterLaw.parse("lognormal:0.3+slow-nodes:0.5,2+J2+messages:0.1")
    assert (law.sigma, law.slow_nodes.factor, law.messages) == (0.3, 2, 0.1)
    assert law.delays == LEVELS["J2"]
    assert JitterLaw.parse("paper:0.2,10,1.0").delays == LEVELS["J2"]


@pytest.mark.parametrize(
    "text",
    [
        "lognormal", "lognormal:-1", "lognormal:inf", "lognormal:nan", "pareto:1", "gauss:1",
        "slow-nodes:2,2", "slow-nodes:0.1,0.5", "paper:1,2", "J9", "lengths:x",
    ],
)  # fmt: skip
def test_other_laws_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--jitter ") as caught:
        JitterLaw.parse(f"none+{text}")
    assert "\n" not in str(caught.value)


def test_lengths_are_those_of_the_microbatch_everywhere() -> None:
    times = draw_times(PIPELINE, MEANS, JitterLaw.parse("lengths:0.5"), Network(), 0)
    assert np.allclose(times.forward, times.forward[0])
    assert np.allclose(times.backward, 2 * times.forward)
    assert times.forward[0].std() > 0.2


def test_ranks_of_a_slow_node_are_slow_together() -> None:
    pipeline = Pipeline(16, 4, replicas=4)
    law, network = JitterLaw.parse("slow-nodes:0.3,2"), Network(ranks_per_node=8)
    times = draw_times(pipeline, MeanTimes.of(pipeline, [1], [2]), law, network, 1)
    slow = times.forward[:, 0].reshape(4, 16)  # replica, stage
    assert set(slow.flatten()) == {1.0, 2.0}
    # Neighbours in Megatron's layout are replicas: a node of 8 holds two stages of all four.
    assert (slow == slow[0]).all()
    assert (slow[0, ::2] == slow[0, 1::2]).all()


def test_a_tensor_parallel_group_is_as_slow_as_its_slowest_rank() -> None:
    law = JitterLaw(sigma=0.3)
    alone, group = (
        draw_times(Pipeline(8, 64, tensor_parallel=size), MEANS, law, Network(), 0)
        for size in (1, 4)
    )
    assert group.forward.mean() > 1.2 * alone.forward.mean()


def test_draws_are_those_of_the_benchmark() -> None:
    """scripts/bench_schedules.py draws the same times, so runs can be compared one by one."""
    times = draw_times(PIPELINE, MEANS, JitterLaw(sigma=0.3), Network(), 7)
    generator = np.random.default_rng(7)
    forward, backward = (
        mean * generator.lognormal(-(0.3**2) / 2, 0.3, (8, 64)) for mean in (1.0, 2.0)
    )
    assert np.allclose(times.forward, forward, rtol=1e-15)
    assert np.allclose(times.backward, backward, rtol=1e-15)


def test_the_papers_delays_add_what_they_should() -> None:
    means = MeanTimes.of(PIPELINE, [20], [40])
    plain, delayed = (
        draw_times(PIPELINE, means, JitterLaw.parse(text), Network(), 0) for text in ("none", "J3")
    )
    extra = delayed.forward - plain.forward
    # With probability 0.3 by 1.5 times the average, times 0.5 to 1.5.
    assert (extra > 0).mean() == pytest.approx(0.3, abs=0.06)
    assert extra[extra > 0].min() >= 15 - 1e-9
    assert extra.max() <= 45
    assert np.array_equal(plain.weight, delayed.weight)  # the delay goes with the first half
