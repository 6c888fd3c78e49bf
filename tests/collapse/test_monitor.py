"""The sequential test: how soon it finds faults, how often it is wrong, that it can go on."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megatron_ext.collapse.alarm import Alarm
from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.cusum import (
    false_alarm_probability,
    mean_time_to_ring,
    threshold_for,
)
from megatron_ext.collapse.monitor import Monitor, MonitorConfig
from megatron_ext.collapse.noise import long_run_noise
from megatron_ext.collapse.observations import Binner, observe_all
from megatron_ext.errors import UsageError
from tests.collapse import curves


def alarms(t: Floats, losses: Floats, config: MonitorConfig | None = None) -> list[Alarm]:
    monitor = Monitor(curves.reference(), config)
    return monitor.observe_all(observe_all(t, losses, np.arange(1.0, t.size + 1)))


def after(t: Floats, start: float = 0.6) -> Floats:
    return (t >= start).astype(float)


@pytest.mark.parametrize("allowance", [0.25, 0.5])
def test_the_threshold_keeps_the_rate(allowance: float) -> None:
    observations, rate, draws = 300, 0.1, 2000
    threshold = threshold_for(rate, allowance, observations)
    noise = np.random.default_rng(1).normal(size=(draws, observations))
    total, rang = np.zeros(draws), np.zeros(draws, dtype=bool)
    for column in noise.T:
        total = np.maximum(total + column - allowance, 0)
        rang |= total > threshold
    assert rang.mean() == pytest.approx(rate, abs=0.025)
    assert false_alarm_probability(threshold, allowance, observations) == pytest.approx(rate)


def test_thresholds_order() -> None:
    assert threshold_for(0.001, 0.5, 400) > threshold_for(0.01, 0.5, 400)
    assert threshold_for(0.01, 0.5, 4000) > threshold_for(0.01, 0.5, 400)
    assert mean_time_to_ring(1e6, 0.5) == math.inf


@pytest.mark.parametrize(("noise", "points"), [(0.001, 100), (0.004, 400), (0.02, 400)])
def test_healthy_runs_ring_no_more_often_than_stated(noise: float, points: int) -> None:
    runs = 60
    wrong = [bool(alarms(*curves.run(points, noise, seed))) for seed in range(runs)]
    # 5% would be 3 of 60; at the stated 1% that is a chance of 2%.
    assert sum(wrong) <= 3


@pytest.mark.parametrize(
    ("shape", "by"),
    [
        (lambda t: 0.01 * after(t), 0.65),
        (lambda t: 0.005 * after(t), 0.75),
        (lambda t: 0.01 * np.clip((t - 0.6) / 0.4, 0, None), 0.9),
    ],
)
def test_faults_are_found(shape: object, by: float) -> None:
    for seed in range(10):
        t, _ = curves.run()
        _, losses = curves.run(seed=seed, fault=shape(t))  # type: ignore[operator]
        (alarm,) = alarms(t, losses)
        assert 0.6 <= alarm.t <= by
        assert alarm.kind == "departure"
        assert 0.59 <= alarm.started_t <= alarm.t
        assert alarm.confidence >= 0.99
        assert 0.001 < alarm.size < 0.012


def test_an_event_rings_once_and_a_second_one_again() -> None:
    t, _ = curves.run()
    fault = 0.02 * ((t >= 0.5) & (t < 0.6)) + 0.02 * ((t >= 0.8) & (t < 0.9))
    found = alarms(t, curves.run(fault=fault)[1])
    assert [round(alarm.started_t, 1) for alarm in found] == [0.5, 0.8]


def test_one_outlier_is_no_departure_and_a_level_is_none() -> None:
    t, losses = curves.run()
    losses[250] *= 1.5
    assert alarms(t, losses) == []
    # A run that is 5% off all along only ends at another loss.
    assert alarms(*curves.run(fault=0.05)) == []


def test_a_run_below_its_reference_is_noted_and_no_alarm() -> None:
    t, _ = curves.run()
    monitor = Monitor(curves.reference())
    observations = observe_all(t, curves.run(fault=-0.01 * after(t))[1], t * 400)
    assert monitor.observe_all(observations) == []
    assert monitor.below_since == pytest.approx(0.6, abs=0.05)


def test_the_prediction_and_its_interval() -> None:
    inside = 0
    for seed in range(20):
        t, losses = curves.run(noise=0.003, seed=seed)
        monitor = Monitor(curves.reference())
        seen = t <= 0.5
        monitor.observe_all(observe_all(t[seen], losses[seen], t[seen] * 400))
        prediction = monitor.predict()
        assert prediction is not None
        assert not prediction.provisional
        assert prediction.loss == pytest.approx(2.5, rel=0.005)
        inside += prediction.interval[0] <= 2.5 <= prediction.interval[1]
    assert inside >= 17


def test_a_prediction_before_the_window_is_provisional() -> None:
    t, losses = curves.run()
    monitor = Monitor(curves.reference())
    assert monitor.predict() is None
    monitor.observe_all(observe_all(t[:60], losses[:60], t[:60] * 400))
    prediction = monitor.predict()
    assert prediction is not None
    assert prediction.provisional


def test_an_expected_final_loss_finds_an_early_fault() -> None:
    t, _ = curves.run()
    fault = 0.03 * after(t, 0.2)
    losses = curves.run(fault=fault)[1]
    assert alarms(t, losses, MonitorConfig()) == []  # before the window all is level
    window = MonitorConfig(window=(0.05, 0.5), expected_final_loss=2.5)
    (first, *_) = alarms(t, losses, window)
    assert 0.2 <= first.t < 0.3


@pytest.mark.parametrize("cut", [50, 130, 245])
def test_a_restored_monitor_goes_on_exactly(cut: int) -> None:
    t, _ = curves.run()
    losses = curves.run(fault=0.008 * after(t))[1]
    observations = observe_all(t, losses, t * 400)
    whole, first, second = (Monitor(curves.reference()) for _ in range(3))
    expected = whole.observe_all(observations)
    found = first.observe_all(observations[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    found += second.observe_all(observations[cut:])
    assert found == expected
    assert second.state() == whole.state()


def test_bins_one_by_one_are_those_of_the_whole() -> None:
    t, losses = curves.run(points=4321)
    steps = np.arange(1.0, t.size + 1)
    binner = Binner()
    online = [binner.add(*point) for point in zip(t.tolist(), losses.tolist(), steps, strict=True)]
    one_by_one = [each for each in [*online, binner.flush()] if each is not None]
    for mine, theirs in zip(observe_all(t, losses, steps), one_by_one, strict=False):
        assert (mine.step, mine.count) == (theirs.step, theirs.count)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-12)


def test_correlated_noise_counts_as_more() -> None:
    rng = np.random.default_rng(0)
    white = rng.normal(size=2000)
    correlated = np.empty_like(white)
    correlated[0] = white[0]
    for i in range(1, white.size):
        correlated[i] = 0.5 * correlated[i - 1] + math.sqrt(0.75) * white[i]
    assert long_run_noise(white) == pytest.approx(1.0, rel=0.15)
    assert long_run_noise(correlated) == pytest.approx(math.sqrt(3), rel=0.25)


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": (0.5, 0.25)},
        {"window": (-0.1, 0.5)},
        {"false_alarm_rate": 0.0},
        {"false_alarm_rate": 1.0},
        {"tolerance": -1.0},
        {"shift": 0.0},
        {"expected_final_loss": float("nan")},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        MonitorConfig(**wrong)  # type: ignore[arg-type]
