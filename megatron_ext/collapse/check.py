"""Compare one run with a reference: is it comparable, where will it end, did it go wrong?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_ext.collapse.alarm import Alarm
from megatron_ext.collapse.comparable import (
    Tolerances,
    compare_controls,
    not_collapsing,
    reference_notes,
    steepness,
)
from megatron_ext.collapse.controls import Controls, controls_of
from megatron_ext.collapse.curve import (
    IGNORED,
    SMOOTH_STEPS,
    Curve,
    final_loss_of,
    mean_deviation,
    smoothed,
)
from megatron_ext.collapse.fast_rules import FastRules
from megatron_ext.collapse.history import History
from megatron_ext.collapse.monitor import Monitor, MonitorConfig
from megatron_ext.collapse.observations import observe_all
from megatron_ext.collapse.timeline import near_in_history
from megatron_ext.errors import UsageError


@dataclass(frozen=True)
class CheckConfig:
    """How to check.

    Attributes:
        monitor: the sequential test.
        tolerances: how far controls may be apart.
        force: compare although the controls differ or the runs do not collapse.
        smooth_steps: width of the moving average for the deviation, in steps.
        given: controls of the run that the user states.
    """

    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    tolerances: Tolerances = field(default_factory=Tolerances)
    force: bool = False
    smooth_steps: float = SMOOTH_STEPS
    given: Controls = field(default_factory=Controls)


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        run: source of the run.
        reference: source of the reference used.
        comparable: whether the reference may be used.
        reasons: why not.
        fraction: how far the run has come.
        final_loss: nats per token, of a finished run.
        predicted_final_loss: nats per token; of a finished run its final loss; None if refused.
        interval: 95% interval of it.
        provisional: whether too little was seen to rely on the prediction.
        mean_deviation: mean |l - l_ref| for t >= 0.2, as a fraction; None if refused or earlier.
        steepness: how much steeper than the reference the run is; None if not known.
        alarms: in the order they rang.
        notes: what was repaired, assumed or could not be compared.
    """

    run: str
    reference: str
    comparable: bool
    reasons: tuple[str, ...]
    fraction: float
    final_loss: float | None
    predicted_final_loss: float | None
    interval: tuple[float, float] | None
    provisional: bool
    mean_deviation: float | None
    steepness: float | None
    alarms: tuple[Alarm, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The result for JSON."""
        fields = dict(vars(self))
        fields["alarms"] = [alarm.to_json() for alarm in self.alarms]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }


def check(
    history: History, references: Sequence[Curve], config: CheckConfig | None = None
) -> CheckResult:
    """Check a run against the first reference whose controls match, else the nearest one.

    Args:
        history: the run, finished or not.
        references: at least one.
        config: how.

    Raises:
        UsageError: A reference cannot be evaluated.
    """
    config = config or CheckConfig()
    if not references:
        raise UsageError("no reference to compare with")
    controls, notes = controls_of(history)
    controls = controls.with_given(config.given)
    compared = [compare_controls(controls, each.controls, config.tolerances) for each in references]
    matching = [i for i, each in enumerate(compared) if not each.reasons]
    fewest = min(range(len(compared)), key=lambda i: len(compared[i].reasons))
    chosen = matching[0] if matching else fewest
    reference, comparison = references[chosen], compared[chosen]
    reasons = list(comparison.reasons)
    notes = [
        *history.notes,
        *notes,
        *comparison.unknown,
        *reference_notes(history.split, reference),
    ]

    t = history.fractions
    observations = observe_all(t, history.losses, history.steps)
    monitor = Monitor(reference, config.monitor, reference.span)
    departures = monitor.observe_all(observations)
    start = max(config.monitor.window[0], reference.span[0])
    # Up to the first departure: what comes after is a fault and no property of the family.
    until = max(departures[0].started_t, 0.5) if departures else 1.0
    healthy = [each for each in observations if each.t <= min(until, reference.span[1])]
    found = steepness(healthy, reference, start)
    if (why_not := not_collapsing(found, config.tolerances.steepness)) is not None:
        reasons.append(why_not)
    usable = not reasons or config.force
    if usable and monitor.below_since is not None:
        notes.append(
            f"the run lies below its reference from t = {monitor.below_since:.2f}: better than "
            "expected, or not the right reference"
        )
    alarms = [*_fast_alarms(history, config.monitor.false_alarm_rate)]
    alarms += departures if usable else []
    alarms.sort(key=lambda alarm: alarm.t)
    predicted, interval, provisional, deviation, final = None, None, False, None, None
    if history.is_complete:
        final, error = final_loss_of(history, config.smooth_steps)
        predicted = final
        interval = (final * (1 - 1.96 * error), final * (1 + 1.96 * error))
    elif usable and (prediction := monitor.predict()) is not None:
        predicted, interval = prediction.loss, prediction.interval
        provisional = prediction.provisional
    divisor = final if final is not None else monitor.final_loss
    if usable and divisor and bool((t >= max(IGNORED, reference.span[0])).any()):
        inside = (t >= reference.span[0]) & (t <= reference.span[1])
        smooth = smoothed(history, config.smooth_steps)
        deviation = mean_deviation(t[inside], smooth[inside], divisor, reference)
    return CheckResult(
        run=history.source,
        reference=reference.source,
        comparable=not reasons,
        reasons=tuple(reasons),
        fraction=float(t[-1]),
        final_loss=final,
        predicted_final_loss=predicted,
        interval=interval,
        provisional=provisional,
        mean_deviation=deviation,
        steepness=None if found is None else found[0],
        alarms=tuple(
            alarm.with_nearby(near_in_history(history, alarm.started_step)) for alarm in alarms
        ),
        notes=tuple(notes),
    )


def _fast_alarms(history: History, rate: float) -> list[Alarm]:
    """Alarms of the rules that need no reference, over every point, bad ones included."""
    steps = np.concatenate((history.steps, np.array(history.bad_steps)))
    losses = np.concatenate((history.losses, np.array(history.bad_losses)))
    order = np.argsort(steps, kind="stable")
    steps, losses = steps[order], losses[order]
    t = np.interp(steps, history.steps, history.fractions)
    return FastRules(rate, losses.size).update(t, steps, losses)


def describe(result: CheckResult, force: bool) -> list[str]:
    """The result in lines for a terminal."""
    lines = [f"run        {result.run}, seen to t = {result.fraction:.3f}"]
    lines.append(f"reference  {result.reference}")
    verdict = "comparable" if result.comparable else "NOT comparable"
    if not result.comparable:
        verdict += ", compared by force" if force else ": refused, --force compares all the same"
    lines.append(f"verdict    {verdict}")
    lines += [f"           {reason}" for reason in result.reasons]
    if result.predicted_final_loss is not None and result.interval is not None:
        low, high = result.interval
        word = "final loss" if result.final_loss is not None else "predicted "
        word += " (provisional)" if result.provisional else ""
        lines.append(f"{word} {result.predicted_final_loss:.4f} ({low:.4f} to {high:.4f})")
    if result.mean_deviation is not None:
        lines.append(f"deviation  {result.mean_deviation:.3%} on average for t >= 0.2")
    lines += [f"ALARM      {alarm}" for alarm in result.alarms] or ["alarms     none"]
    lines += [f"note       {note}" for note in result.notes]
    return lines
