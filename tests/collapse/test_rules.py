"""The rules without a reference, what is near an alarm, and the callback without Megatron."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ext.collapse.callback import CollapseCallback, Outlets, StepFacts
from megatron_ext.collapse.fast_rules import FastRules
from megatron_ext.collapse.monitor import MonitorConfig
from megatron_ext.collapse.timeline import near_in_history
from tests.collapse import curves


def losses_with(changes: dict[int, float], count: int = 1000) -> np.ndarray:
    losses = 3.0 + np.random.default_rng(0).normal(0, 0.05, count)
    for place, value in changes.items():
        losses[place] = value
    return losses


def rules(losses: np.ndarray, chunk: int = 10**9) -> list[tuple[int, str]]:
    watch, found = FastRules(0.01, losses.size), []
    t, steps = np.arange(losses.size) / losses.size, np.arange(losses.size)
    for start in range(0, losses.size, chunk):
        part = slice(start, start + chunk)
        found += watch.update(t[part], steps[part], losses[part])
        watch_state = json.loads(json.dumps(watch.state()))
        watch = FastRules(0.01, losses.size)
        watch.restore(watch_state)
    return [(alarm.step, alarm.kind) for alarm in found]


def test_nothing_in_noise() -> None:
    assert rules(losses_with({})) == []


def test_each_kind() -> None:
    changes = {300: float("nan"), 301: float("nan"), 400: float("inf"), 500: 6.0}
    changes |= dict.fromkeys(range(700, 740), 9.0)
    found = rules(losses_with(changes))
    assert found == [
        (300, "nan"),
        (400, "infinity"),
        (500, "spike"),
        (700, "spike"),
        (715, "divergence"),
    ]
    assert rules(losses_with(changes), chunk=1) == found
    assert rules(losses_with(changes), chunk=37) == found


def test_what_is_near() -> None:
    t, losses = curves.run()
    rates = np.full(t.size, 0.1)
    rates[240:] = 0.05
    sizes = np.full(t.size, 8.0)
    sizes[242:] = 16.0
    norms = np.ones(t.size)
    norms[239] = 50.0
    extras = {"lr": rates, "batch_size": sizes, "grad_norm": norms, "samples": t * 3200}
    history = curves.history(t, losses, extras=extras, restarts=(241.0,))
    near = " | ".join(near_in_history(history, 240))
    for part in ("restart at step 241", "learning rate 0.1 -> 0.05", "batch size 8 -> 16"):
        assert part in near
    assert "gradient norm 50" in near
    assert "data position 1920 samples" in near
    assert "restart" not in " ".join(near_in_history(history, 100))


class Sink:
    """Keeps what a callback gives out."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.said: list[str] = []
        self.alerts: list[str] = []

    def outlets(self) -> Outlets:
        return Outlets(
            metrics=lambda values, step: self.metrics.append((step, values)),
            say=self.said.append,
            alert=lambda alarm: self.alerts.append(alarm.kind),
            facts=lambda context: context.facts,
        )


def train(callback: CollapseCallback, losses: np.ndarray) -> None:
    callback.on_train_start()
    for i, loss in enumerate(losses.tolist(), 1):
        facts = StepFacts(i, i / losses.size, 0.1, 8, 8 * i)
        losses_by_name = {"lm loss": loss}
        callback.on_train_step_start()
        callback.on_train_step_end(
            SimpleNamespace(loss_dict=losses_by_name, grad_norm=1.0, skipped_iter=0, facts=facts)
        )
        if i % 10 == 0:
            callback.on_log()
    callback.on_train_end()


def test_the_callback_alerts_once_per_event() -> None:
    t, _ = curves.run(points=2000)
    _, losses = curves.run(points=2000, fault=0.02 * (t >= 0.6))
    sink = Sink()
    callback = CollapseCallback(
        [curves.reference()], curves.reference().controls, MonitorConfig(), 2000, sink.outlets()
    )
    train(callback, losses)
    assert sink.alerts == ["departure"]
    assert callback.take_action()
    assert not callback.take_action()
    rang = [step for step, values in sink.metrics if values["collapse/alarm"]]
    assert 1200 < rang[0] < 1240
    last = sink.metrics[-1][1]
    assert last["collapse/residual"] == pytest.approx(0.02, abs=0.006)
    assert last["collapse/predicted final loss"] == pytest.approx(2.55, rel=0.01)
    assert last["collapse/normalized loss"] == pytest.approx(1.02, abs=0.01)


def test_the_callback_refuses_a_reference_with_another_schedule() -> None:
    sink = Sink()
    other = curves.reference(lr_peak=1e-2)
    callback = CollapseCallback(
        [other], curves.reference().controls, MonitorConfig(), 100, sink.outlets()
    )
    train(callback, curves.run(points=100)[1])
    assert "tau differs 10.00 times" in sink.said[0]
    assert set(sink.metrics[-1][1]) == {"collapse/alarm"}


def test_a_state_of_another_reference_is_not_taken() -> None:
    def make(**controls: object) -> CollapseCallback:
        curve = curves.reference(**controls)
        return CollapseCallback([curve], curve.controls, MonitorConfig(), 100, Sink().outlets())

    state = make().state()
    assert make().restore(json.loads(json.dumps(state)))
    assert not make().restore({**state, "reference": "another"})
    assert not make().restore({**state, "version": 99})
    assert not make().restore({**state, "monitor": None})
    assert not make().restore("nonsense")


def test_a_step_costs_little() -> None:
    callback = CollapseCallback(
        [curves.reference()], curves.CONTROLS, MonitorConfig(), 4000, Sink().outlets(), force=True
    )
    started = time.process_time()
    train(callback, curves.run(points=4000)[1])
    per_step = (time.process_time() - started) / 4000
    assert per_step < 1e-3  # 0.1% of an iteration of one second, with room for a slow machine
