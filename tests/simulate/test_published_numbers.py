"""Numbers that the documents print, from few draws, and how long a simulation takes."""

from __future__ import annotations

import statistics
import time

import pytest

from megatron_ext.simulate.jitter_law import JitterLaw
from megatron_ext.simulate.job import Job, summarize
from megatron_ext.simulate.network import Network
from megatron_ext.simulate.paper_model import compute_share, hop_of_table_3
from megatron_ext.simulate.paper_settings import TABLE_1, TABLE_2
from megatron_ext.simulate.pipeline import BASELINE, Pipeline, Policy
from megatron_ext.simulate.task_times import MeanTimes


def job(stages: int, latency: float, iterations: int = 10, sigma: float = 0.3) -> Job:
    pipeline = Pipeline(stages, 64, iterations=iterations)
    means = MeanTimes.of(pipeline, [1], [2])
    return Job(pipeline, means, JitterLaw(sigma=sigma), Network(latency))


@pytest.mark.parametrize(
    ("stages", "latency", "expected"),
    [
        (8, 0, (1.07, 1.27, 1.33, 1.35, 1.36)),
        (8, 0.3, (1.08, 1.355, 1.44, 1.47, 1.49)),
        (16, 0, (1.15, 1.35, 1.49, 1.50, 1.51)),
        (16, 0.3, (1.16, 1.41, 1.61, 1.65, 1.67)),
    ],
)
def test_bounded_bfw_and_2bw_reach_the_floor_together(
    stages: int, latency: float, expected: tuple[float, ...]
) -> None:
    policies = [
        Policy("1f1b", "p", True),
        Policy("bfw", "1.5p"),
        Policy("bfw", "1.5p", True),
        Policy("bfw", "2p", True),
    ]
    found = summarize(job(stages, latency), policies, range(3))
    speedups = [summary.speedup_vs_1f1b for summary in found]
    floor = found[0].speedup_vs_1f1b / found[0].floor_ratio
    assert [*speedups, floor] == pytest.approx(expected, rel=0.015)


def test_hints_at_1f1bs_own_memory() -> None:
    names = ["bfw", "bfw-depth", "bfw-room", "bfw-pieces"]
    means = {}
    for stages in (8, 16):
        found = summarize(
            job(stages, 0, iterations=1), [Policy(name, "p") for name in names], range(12)
        )
        means[stages] = [summary.speedup_vs_1f1b for summary in found]
        assert max(summary.peak_live for summary in found) <= stages
    both = [statistics.geometric_mean(pair) for pair in zip(means[8], means[16], strict=True)]
    assert both == sorted(both)
    assert means[8][2] >= 1.185
    assert means[16][2] >= 1.245
    assert means[8][3] >= 1.22
    assert means[16][3] >= 1.29


def test_a_large_pipeline_takes_little_time() -> None:
    pipeline = Pipeline(64, 512)
    large = Job(
        pipeline, MeanTimes.of(pipeline, [1], [2]), JitterLaw(sigma=0.3), Network(latency=0.3)
    )
    started = time.process_time()
    large.run(large.draw(0), Policy("bfw-depth", "p"))
    assert time.process_time() - started < 1.5


def test_the_papers_settings_are_as_printed() -> None:
    ratios = [setting.seconds_1f1b / setting.seconds_bfw for setting in TABLE_1 + TABLE_2]
    printed = [
        1.56, 1.77, 1.30, 1.49, 2.02, 2.09, 1.75, 1.86, 1.87, 2.29, 1.72, 2.24,
        2.77, 2.73, 1.77, 1.84, 1.80, 1.37, 1.83, 1.56,
    ]  # fmt: skip
    assert ratios == pytest.approx(printed, abs=0.011)


def test_the_model_of_the_papers_machine_computes_as_little_as_it() -> None:
    share = compute_share(BASELINE, hop_of_table_3(0), 0, blocking=True)
    assert share == pytest.approx(0.3328, abs=0.002)
