"""Watches the loss of a training in progress; knows no Megatron, only its callbacks' shape.

The methods have the names and the argument of Megatron's callbacks (`on_train_step_end(context)`
and so on, `context` with ``loss_dict``, ``grad_norm`` and ``skipped_iter``), so that one object can
be driven by a hook and be given to a Megatron that has callbacks. What a context does not say comes
from `facts`; what is to be written goes out through `outlets`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron_ext.collapse.alarm import Alarm
from megatron_ext.collapse.comparable import compare_controls
from megatron_ext.collapse.controls import Controls
from megatron_ext.collapse.curve import Curve
from megatron_ext.collapse.fast_rules import FastRules
from megatron_ext.collapse.monitor import Monitor, MonitorConfig
from megatron_ext.collapse.observations import Binner
from megatron_ext.collapse.timeline import NEAR, Timeline, Watch

STATE_VERSION = 1
MOST_WAITING = 256
"""Losses stay on the device until the next log; at most so many."""
LOSS = "lm loss"


class StepContext(Protocol):
    """What Megatron tells a callback after a step; other attributes are not used."""

    @property
    def loss_dict(self) -> Mapping[str, Any]:
        """Losses by name; empty on ranks that have none."""
        ...

    @property
    def grad_norm(self) -> float | None:
        """Before clipping; None where Megatron did not compute it."""
        ...

    @property
    def skipped_iter(self) -> int:
        """1 where the optimizer skipped the step."""
        ...


@dataclass(frozen=True)
class StepFacts:
    """What Megatron's arguments and optimizer say after a step.

    Attributes:
        iteration: from 1, of the step that has just ended.
        fraction: of training, after it.
        learning_rate: of the step, or None.
        batch_size: in sequences.
        samples: consumed so far.
    """

    iteration: int
    fraction: float
    learning_rate: float | None
    batch_size: int
    samples: int


@dataclass(frozen=True)
class Outlets:
    """Where things go.

    Attributes:
        metrics: takes names and values, and the iteration.
        say: takes a line for the console.
        alert: takes an alarm, once per event.
        facts: gives what the context of the step that has just ended does not say.
    """

    metrics: Callable[[dict[str, float], int], None]
    say: Callable[[str], None]
    alert: Callable[[Alarm], None]
    facts: Callable[[Any], StepFacts]


class CollapseCallback:
    """The watch over one run, on the rank that has the loss.

    Args:
        references: the first whose controls match is used.
        controls: of this run.
        config: how to test.
        iterations: length of the run.
        outlets: where things go.
        force: compare although controls differ.
    """

    def __init__(
        self,
        references: Sequence[Curve],
        controls: Controls,
        config: MonitorConfig,
        iterations: int,
        outlets: Outlets,
        force: bool = False,
    ) -> None:
        compared = [compare_controls(controls, each.controls) for each in references]
        matching = [place for place, each in enumerate(compared) if not each.reasons]
        chosen = matching[0] if matching else 0
        self.reference = references[chosen]
        self.refused = () if matching or force else compared[chosen].reasons
        """Why the reference is not used; empty if it is."""
        self.unknown = compared[chosen].unknown
        self.alarms: list[Alarm] = []
        self._config = config
        self._outlets = outlets
        self._binner = Binner()
        self._monitor = Monitor(self.reference, config, self.reference.span)
        self._fast = FastRules(config.false_alarm_rate, iterations)
        self._timeline = Timeline()
        self._watch = Watch(self._timeline)
        self._length = iterations
        self._waiting: list[tuple[StepFacts, Any, float | None, int]] = []
        self._interval: list[float] = []
        self._rang = False
        self._last: StepFacts | None = None
        self._pending_action = False

    def on_train_start(self, context: object = None) -> None:
        """Say what is compared, or why not."""
        if self.refused:
            self._outlets.say(
                f"{self.reference.source} is not comparable and not used: "
                f"{'; '.join(self.refused)}; --collapse-force compares all the same"
            )
            return
        self._outlets.say(f"the loss is compared with {self.reference.source}")
        for text in self.unknown:
            self._outlets.say(text)

    def on_train_step_start(self, context: object = None) -> None:
        """Nothing: the loss comes at the end of a step."""

    def on_train_step_end(self, context: StepContext) -> None:
        """Keep the loss of a step; it stays on the device until the next log.

        Args:
            context: with the losses by name; without them on ranks that have none.
        """
        facts = self._outlets.facts(context)
        losses = context.loss_dict
        loss = losses.get(LOSS, next(iter(losses.values()), None)) if losses else None
        self._waiting.append((facts, loss, context.grad_norm, int(context.skipped_iter)))
        if len(self._waiting) >= MOST_WAITING:
            self._drain()

    def on_log(self, context: object = None) -> None:
        """Look at the losses since the last log, write the metrics, ring if need be."""
        self._drain()
        if self._last is None:
            return
        metrics = {"collapse/alarm": float(self._rang or self._monitor.in_departure)}
        self._rang = False
        interval, self._interval = self._interval, []
        if not self.refused:
            t = self._last.fraction
            metrics["collapse/reference"] = float(self.reference.at(np.array([t]))[0])
            if self._monitor.final_loss and interval:
                mean = math.fsum(interval) / len(interval)
                metrics["collapse/normalized loss"] = mean / self._monitor.final_loss
            if not math.isnan(self._monitor.residual):
                metrics["collapse/residual"] = self._monitor.residual
            if (prediction := self._monitor.predict()) is not None:
                metrics["collapse/predicted final loss"] = prediction.loss
        self._outlets.metrics(metrics, self._last.iteration)

    def on_eval_start(self, context: object = None) -> None:
        """Nothing: training losses are watched."""

    def on_eval_end(self, context: object = None) -> None:
        """Nothing: training losses are watched."""

    def on_train_end(self, context: object = None) -> None:
        """Look at what has come since the last log."""
        self._drain()
        self._look(self._binner.flush())

    def take_action(self) -> bool:
        """Whether an alarm has rung since this was last asked."""
        pending, self._pending_action = self._pending_action, False
        return pending

    def restarted(self, iteration: int) -> None:
        """Note that the run went on from a checkpoint."""
        self._timeline.add(iteration, "restart from a checkpoint")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the statistics up to here."""
        self._drain()
        return {
            "version": STATE_VERSION,
            "reference": self.reference.source,
            "final_loss": self.reference.final_loss,
            "binner": self._binner.state(),
            "monitor": self._monitor.state(),
            "fast": self._fast.state(),
            "timeline": self._timeline.state(),
            "watch": self._watch.state(),
            "alarms": [alarm.to_json() for alarm in self.alarms],
            "rang": self._rang,
            "interval": self._interval,
        }

    def restore(self, state: Any) -> bool:
        """Go on from `state`.

        Returns:
            Whether that was possible: it is of this version, whole, and of the same reference.
        """
        fresh = dict(vars(self))
        try:
            if state["version"] != STATE_VERSION or state["reference"] != self.reference.source:
                return False
            if state["final_loss"] != self.reference.final_loss:
                return False
            self._binner.restore(state["binner"])
            self._monitor = Monitor(self.reference, self._config, self.reference.span)
            self._monitor.restore(state["monitor"])
            self._fast.restore(state["fast"])
            self._timeline.restore(state["timeline"])
            self._watch.restore(state["watch"])
            self.alarms = [Alarm.from_json(each) for each in state["alarms"]]
            self._rang = bool(state["rang"])
            self._interval = [float(each) for each in state["interval"]]
        except (AssertionError, KeyError, IndexError, TypeError, ValueError, AttributeError):
            vars(self).update(fresh)
            return False
        return True

    def _drain(self) -> None:
        waiting, self._waiting = self._waiting, []
        for facts, loss, grad_norm, skipped in waiting:
            self._take(facts, loss, grad_norm, skipped)

    def _take(self, facts: StepFacts, loss: Any, grad_norm: float | None, skipped: int) -> None:
        self._last = facts
        step = facts.iteration
        if facts.learning_rate is not None:
            self._watch.rate(step, facts.learning_rate)
        self._watch.batch(step, facts.batch_size)
        self._watch.skipped(step, skipped)
        if grad_norm is not None and math.isfinite(float(grad_norm)):
            self._watch.norm(step, float(grad_norm))
        if loss is None or skipped:
            return
        value = _number(loss)
        t = np.array([facts.fraction])
        for alarm in self._fast.update(t, [step], np.array([value])):
            self._ring(alarm)
        if math.isfinite(value) and value > 0:
            self._interval.append(value)
            self._look(self._binner.add(facts.fraction, value, step))

    def _look(self, observation: Any) -> None:
        if observation is None or self.refused:
            return
        alarm = self._monitor.observe(observation)
        if alarm is not None:
            self._ring(alarm)

    def _ring(self, alarm: Alarm) -> None:
        width = max(NEAR * self._length, 3)
        near = self._timeline.near(alarm.started_step - width, alarm.started_step + width)
        samples = self._last.samples if self._last is not None else 0
        alarm = replace(alarm, nearby=(*near, f"data position {samples} samples"))
        self.alarms.append(alarm)
        self._rang = self._pending_action = True
        self._outlets.say(f"ALARM: {alarm}")
        self._outlets.alert(alarm)


def _number(loss: Any) -> float:
    """The value of a loss: a number, or a tensor of one element or of a sum and a count."""
    values = loss.reshape(-1).tolist() if hasattr(loss, "reshape") else [float(loss)]
    return float(values[0] / values[1]) if len(values) == 2 else float(values[0])
