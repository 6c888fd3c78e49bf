"""The watch as a callback of a Megatron that has callbacks: `pretrain(..., callbacks=[...])`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron_ext.collapse.callback import CollapseCallback, Outlets, StepFacts
from megatron_ext.collapse.monitor import MonitorConfig
from tests.collapse import curves

EVENTS = (
    *("on_train_start", "on_train_step_start", "on_train_step_end", "on_log", "on_train_end"),
    *("on_eval_start", "on_eval_end"),
)
POINTS = 400


@dataclass
class Context:
    """What Megatron passes: one object for the whole run, filled in as the run goes on."""

    model: Any = None
    user_state: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    scheduler: Any = None
    loss_dict: dict[str, Any] | None = None
    grad_norm: float | None = None
    skipped_iter: bool | None = None
    total_loss_dict: dict[str, Any] | None = None
    timers_to_log: list[str] | None = None
    log_fragments: list[str] | None = None


class Manager:
    """Megatron's way to register and fire, for a Megatron that has none yet."""

    def __init__(self) -> None:
        self.callback_context = Context()
        self._methods: dict[str, list[Any]] = {}

    def add(self, callback: Any) -> None:
        for event in EVENTS:
            if (method := getattr(callback, event, None)) is not None:
                assert inspect.ismethod(method)  # it looks at the function behind it
                self._methods.setdefault(event, []).append(method)

    def fire(self, event: str) -> None:
        for method in self._methods.get(event, ()):
            method(self.callback_context)


def make_manager() -> Any:
    """Megatron's own where it has one."""
    found = importlib.util.find_spec("megatron.training.callbacks")
    if found is None:
        return Manager()
    return importlib.import_module("megatron.training.callbacks").CallbackManager()


def test_it_is_driven_as_megatron_drives_its_callbacks() -> None:
    _, losses = curves.run(points=POINTS)
    losses = losses.copy()
    losses[300] = np.nan
    logged: list[int] = []
    alerts: list[str] = []
    evaluated = 0
    iteration = 0

    def facts(context: object) -> StepFacts:
        return StepFacts(iteration, iteration / POINTS, None, 8, 8 * iteration)

    outlets = Outlets(
        metrics=lambda values, step: logged.append(step),
        say=lambda text: None,
        alert=lambda alarm: alerts.append(alarm.kind),
        facts=facts,
    )
    reference = curves.reference()
    callback = CollapseCallback(
        [reference], reference.controls, MonitorConfig(), POINTS, outlets, force=True
    )
    manager = make_manager()
    manager.add(callback)
    context = manager.callback_context
    context.user_state["of somebody else"] = 1
    manager.fire("on_train_start")
    for loss in losses.tolist():
        manager.fire("on_train_step_start")
        iteration += 1
        context.loss_dict, context.grad_norm = {"lm loss": np.array([loss])}, 1.0
        context.skipped_iter = False
        manager.fire("on_train_step_end")
        if iteration % 10 == 0:
            context.timers_to_log, context.log_fragments = [], []
            manager.fire("on_log")
        if iteration % 100 == 0:
            manager.fire("on_eval_start")
            manager.fire("on_eval_end")
            evaluated += 1
    manager.fire("on_train_end")
    assert logged == list(range(10, POINTS + 1, 10))
    assert alerts == ["nan"]
    assert evaluated == 4
    assert context.user_state == {"of somebody else": 1}


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_takes_the_context_alone(event: str) -> None:
    inspect.signature(getattr(CollapseCallback, event)).bind(None, Context())
