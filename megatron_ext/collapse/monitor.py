"""Watches a run against its reference: a sequential test for a sustained departure.

The residual of an observation is what is left of its loss over the aligned reference, before it
is taken into the alignment. Runs of other sizes drift away from a reference by up to 0.004 of the
final loss while they are healthy; the alignment follows that slowly, so a residual shows change
and not level. Page's CUSUM adds up what exceeds the run's own noise. Its threshold is the one at
which a healthy run rings with the stated probability, see `cusum`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.collapse.alarm import Alarm
from megatron_ext.collapse.align import Alignment, Prediction
from megatron_ext.collapse.curve import NormalisedLoss
from megatron_ext.collapse.cusum import false_alarm_probability, threshold_for
from megatron_ext.collapse.noise import long_run_noise
from megatron_ext.collapse.observations import PARTS, Observation
from megatron_ext.errors import UsageError

LEAST_RESIDUALS = 10
"""Observations needed for an estimate of the noise."""
MOST_RESIDUALS = 80
"""Only so many of the latest count: noise falls as the learning rate does."""
SETTLED_AFTER = 0.05
"""Part of training after the window's start at which the alignment is good enough to test with."""
CLIP = 4.0
"""No single observation counts for more standard deviations than this: one outlier is no
sustained departure."""
ERROR_SCALE = 1.3
"""The alignment's standard error times this is what predictions of healthy runs are off by."""
PROVISIONAL_SCALE = 3.0
"""The same for predictions from too little of a run."""
RECENT = 8
"""Observations whose mean says how far off the run is now."""


@dataclass(frozen=True)
class MonitorConfig:
    """How to test.

    Attributes:
        window: fractions of training from which on to align, and at which that is settled.
        false_alarm_rate: accepted chance of a false alarm in one healthy run.
        tolerance: departures up to this, over the final loss, count as healthy.
        shift: the departure that the test is tuned to find soonest, over the final loss.
        expected_final_loss: nats per token, instead of what the window says.
    """

    window: tuple[float, float] = (0.25, 0.5)
    false_alarm_rate: float = 0.01
    tolerance: float = 0.00075
    shift: float = 0.005
    expected_final_loss: float | None = None

    def __post_init__(self) -> None:
        start, end = self.window
        if not 0 <= start < end <= 1:
            raise UsageError(f"window {start}-{end} is not START-END with 0 <= START < END <= 1")
        if not 0 < self.false_alarm_rate < 1:
            raise UsageError(f"false-alarm rate {self.false_alarm_rate} is not between 0 and 1")
        if not self.tolerance >= 0 or not self.shift > 0:
            raise UsageError("tolerance must be at least 0 and shift above 0")
        expected = self.expected_final_loss
        if expected is not None and not (math.isfinite(expected) and expected > 0):
            raise UsageError(f"expected final loss {expected} is not a positive number")


@dataclass
class _Event:
    """A departure that has rung and is not over."""

    size: float
    recent: list[float]


class Monitor:
    """Takes observations in order and rings when the run departs upwards.

    Args:
        reference: the normalised loss to compare with.
        config: how to test.
        span: part of training that the reference covers; nothing is compared outside.
    """

    def __init__(
        self,
        reference: NormalisedLoss,
        config: MonitorConfig | None = None,
        span: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.config = config or MonitorConfig()
        self._reference = reference
        self._span = span
        self._alignment = Alignment(self.config.expected_final_loss)
        self._early = Alignment()
        self._last_t = 0.0
        self._seen = 0
        self._residuals: list[float] = []
        self._spacing: list[float] = []
        self._held: list[tuple[float, float, float]] | None = []
        self._sum = 0.0
        self._onset: tuple[float, int] = (0.0, 0)
        self._since: list[float] = []
        self._sum_below = 0.0
        self._event: _Event | None = None
        self.residual = math.nan
        """Residual of the last observation, over the final loss; NaN before the alignment."""
        self.below_since: float | None = None
        """Fraction at which the run was found below its reference for good, if it was."""

    def observe(self, seen: Observation) -> Alarm | None:
        """Take an observation in.

        Returns:
            An alarm if a departure is now certain enough; once per departure.
        """
        if not self._span[0] <= seen.t <= self._span[1]:
            return None
        reference = float(self._reference.at(np.array([seen.t]))[0])
        spacing, self._last_t = seen.t - self._last_t, seen.t
        # After a hole a point does not stand for all of the hole.
        weight = min(max(spacing * 100, 1e-3), 2.0)
        if seen.t < self.config.window[0]:
            self._early.update(seen.loss, reference, weight)
            if self.config.expected_final_loss is None:
                return None
        self._seen += 1
        self._spacing = [*self._spacing[-MOST_RESIDUALS:], spacing]
        residual = self._alignment.residual(seen.loss, reference)
        if self._seen > 1:
            self.residual = residual
            self._residuals = [*self._residuals[-MOST_RESIDUALS + 1 :], residual]
        if self._event is not None:
            self._follow_event(residual)
            return None
        alarm = None if self._held is not None else self._test(seen, residual, reference)
        if alarm is None:
            self._align(seen, reference, weight)
        return alarm

    def _align(self, seen: Observation, reference: float, weight: float) -> None:
        """Take an observation into the alignment.

        How much the first ones count depends on noise that is not known yet: once it is, the
        alignment starts again with them.
        """
        if self._held is not None:
            self._held.append((seen.loss, reference, weight))
            if self.is_settled(seen.t):
                self._alignment = Alignment(self.config.expected_final_loss)
                for held in self._held:
                    self._alignment.update(*held, self.noise)
                self._held = None
                return
        self._alignment.update(seen.loss, reference, weight, self.noise)

    def observe_all(self, observations: Sequence[Observation]) -> list[Alarm]:
        """Take observations in, in order; all alarms."""
        alarms = (self.observe(each) for each in observations)
        return [alarm for alarm in alarms if alarm is not None]

    def is_settled(self, t: float) -> bool:
        """Whether enough has been seen by fraction `t` to test and to predict."""
        enough = len(self._residuals) >= LEAST_RESIDUALS
        return enough and t >= self.config.window[0] + SETTLED_AFTER

    @property
    def noise(self) -> float:
        """Standard deviation of an observation, over the final loss; 0 while unknown."""
        if len(self._residuals) < LEAST_RESIDUALS:
            return 0.0
        return long_run_noise(np.array(self._residuals))

    def predict(self) -> Prediction | None:
        """The final loss; None before the first observation."""
        provisional = not self.is_settled(self._last_t)
        # Before the window the little there is, if nothing was expected beforehand.
        used = self._alignment if self._seen else self._early
        if not used.final_loss:
            return None
        loss, error = used.final_loss, used.error
        if self._event is not None:  # if it stays as far off as it is now
            departure = float(np.mean(self._event.recent))
            loss *= 1 + departure
            error += abs(departure) * used.final_loss / 2
        scale = PROVISIONAL_SCALE if provisional else ERROR_SCALE
        return Prediction(loss, error * scale, provisional)

    @property
    def final_loss(self) -> float:
        """The divisor that normalises the run so far, departures left out; 0 if unknown."""
        return self._alignment.final_loss or self._early.final_loss

    @property
    def in_departure(self) -> bool:
        """Whether a departure has rung and is not over."""
        return self._event is not None

    def _test(self, seen: Observation, residual: float, reference: float) -> Alarm | None:
        sigma = self.noise
        # Best for a shift of this size in noise of this size; never below what keeps the sum of
        # noise alone from growing for long.
        allowance = min(max(self.config.shift / sigma / 2, 0.1), 0.5)
        expected = min(1.0 / float(np.median(self._spacing)), PARTS) * (1 - self.config.window[0])
        threshold = threshold_for(
            self.config.false_alarm_rate, round(allowance, 2), float(max(round(expected), 1))
        )
        spread = math.hypot(sigma, self._alignment.uncertainty(reference))
        z = min(max((residual - self.config.tolerance) / spread, -CLIP), CLIP)
        if self._sum <= 0:
            self._onset, self._since = (seen.t, seen.step), []
        self._since.append(residual)
        self._sum = max(0.0, self._sum + z - allowance)
        below = min(max((-residual - self.config.tolerance) / spread, -CLIP), CLIP)
        self._sum_below = max(0.0, self._sum_below + below - allowance)
        if self._sum_below > threshold:
            self._start_again(seen.t)
            return None
        if self._sum <= threshold:
            return None
        size = float(np.mean(self._since))
        confidence = 1 - false_alarm_probability(self._sum, round(allowance, 2), expected)
        self._event = _Event(size, self._since[-RECENT:])
        self._sum = 0.0
        started_t, started_step = self._onset
        return Alarm(seen.t, seen.step, "departure", size, confidence, started_t, started_step)

    def _start_again(self, t: float) -> None:
        """Align anew from here: a run that has become better than expected is no fault.

        To go on from the old alignment would make it look as if it became worse when it has only
        come back to the shape of its reference.
        """
        self.below_since = t if self.below_since is None else self.below_since
        self._alignment = Alignment(self.config.expected_final_loss)
        self._held, self._residuals = [], []
        self._sum = self._sum_below = 0.0

    def _follow_event(self, residual: float) -> None:
        """The alignment rests during a departure; it is over when the run is back for a while."""
        event = self._event
        assert event is not None
        event.recent = [*event.recent[-RECENT + 1 :], residual]
        now = float(np.mean(event.recent))
        event.size = max(event.size, now)
        if len(event.recent) == RECENT and now < max(self.config.tolerance, event.size / 4):
            self._event = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "alignment": self._alignment.state(),
            "early": self._early.state(),
            "last_t": self._last_t,
            "seen": self._seen,
            "residuals": self._residuals,
            "spacing": self._spacing,
            "held": None if self._held is None else [list(each) for each in self._held],
            "sum": self._sum,
            "onset": list(self._onset),
            "since": self._since,
            "sum_below": self._sum_below,
            "event": None if self._event is None else [self._event.size, self._event.recent],
            "residual": None if math.isnan(self.residual) else self.residual,
            "below_since": self.below_since,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._alignment.restore(state["alignment"])
        self._early.restore(state["early"])
        self._last_t, self._seen = float(state["last_t"]), int(state["seen"])
        self._residuals = [float(each) for each in state["residuals"]]
        self._spacing = [float(each) for each in state["spacing"]]
        held = state["held"]
        self._held = None if held is None else [(each[0], each[1], each[2]) for each in held]
        self._sum, self._sum_below = float(state["sum"]), float(state["sum_below"])
        self._onset = (float(state["onset"][0]), int(state["onset"][1]))
        self._since = [float(each) for each in state["since"]]
        event = state["event"]
        self._event = None if event is None else _Event(float(event[0]), list(event[1]))
        self.residual = math.nan if state["residual"] is None else float(state["residual"])
        self.below_since = state["below_since"]
