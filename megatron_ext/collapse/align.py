"""The final loss of an unfinished run: the divisor that lays it onto the reference.

A run of another size follows the reference up to a scale and, a little, up to how steep it is:
larger models of a healthy family fall by some percent more or less than the reference. So the loss
is L r(t) + c (r(t) - 1), with r the reference. At the end r = 1 and only L is left. A prior keeps
c / L near 0 while little has been seen; without it (c = 0) the estimate is the paper's
early-align, off by up to 0.7% where this one is by up to 0.4%.

Estimated point by point, so that a run in progress costs the same at every step and a checkpoint
carries five numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ext.collapse.arrays import Floats

STEEPNESS = 0.03
"""Prior standard deviation of c / L."""
NOISE = 0.002
"""Standard deviation, over the loss, of a mean over 1% of training around the aligned reference:
much more than measurement noise, since what is left moves slowly."""
EXPECTED = 0.003
"""Standard deviation of a given expected final loss, over the loss."""
OUTLIER = 3.0
"""Points further off than this many standard deviations count as if they were this far off."""


@dataclass(frozen=True)
class Prediction:
    """A predicted final loss.

    Attributes:
        loss: nats per token.
        error: standard error, nats per token.
        provisional: whether too little of the run has been seen to rely on it.
    """

    loss: float
    error: float
    provisional: bool

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval, nats per token."""
        return (self.loss - 1.96 * self.error, self.loss + 1.96 * self.error)


class Alignment:
    """A run's scale and steepness over a reference, updated with every point.

    Args:
        expected: the final loss expected, in nats per token, if there is one.
        steepness: prior standard deviation of c / L.
    """

    def __init__(self, expected: float | None = None, steepness: float = STEEPNESS) -> None:
        self._unit = 0.0
        self._expected = expected
        self._steepness = steepness
        self._mean = np.array([1.0, 0.0])
        self._covariance = np.diag([1.0, steepness**2])

    def residual(self, loss: float, reference: float) -> float:
        """What is left of a loss over the aligned reference, in units of the final loss."""
        if not self._unit:
            return 0.0
        expected = self._mean @ self._at(reference)
        return float((loss / self._unit - expected) / self._mean[0])

    def update(self, loss: float, reference: float, weight: float, noise: float = 0.0) -> None:
        """Take a point in.

        Args:
            loss: nats per token.
            reference: normalised loss of the reference at the same fraction of training.
            weight: the fraction of training it stands for, in percent.
            noise: standard deviation of the point by itself, over the final loss.
        """
        if not self._unit:
            self._unit = self._expected or loss / reference
            if self._expected:
                self._covariance[0, 0] = EXPECTED**2
        at = self._at(reference)
        variance = at @ self._covariance @ at + NOISE**2 / weight + noise**2
        innovation = loss / self._unit - self._mean @ at
        most = OUTLIER * math.sqrt(variance)
        gain = self._covariance @ at / variance
        self._mean = self._mean + gain * min(max(float(innovation), -most), most)
        self._covariance = self._covariance - np.outer(gain, at @ self._covariance)

    @property
    def final_loss(self) -> float:
        """L, nats per token; 0 before the first point."""
        return float(self._mean[0]) * self._unit

    @property
    def error(self) -> float:
        """Standard error of `final_loss`, nats per token."""
        return math.sqrt(max(float(self._covariance[0, 0]), 0.0)) * self._unit

    @property
    def steepness(self) -> tuple[float, float]:
        """How much steeper than the reference the run is (c / L), and its standard error."""
        error = math.sqrt(max(float(self._covariance[1, 1]), 0.0))
        return float(self._mean[1] / self._mean[0]), error

    def uncertainty(self, reference: float) -> float:
        """Standard error of the aligned reference at a point, in units of the final loss."""
        at = self._at(reference)
        return math.sqrt(max(float(at @ self._covariance @ at), 0.0))

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {
            "unit": self._unit,
            "mean": self._mean.tolist(),
            "covariance": self._covariance.tolist(),
        }

    def restore(self, state: dict[str, object]) -> None:
        """Go on from `state`."""
        self._unit = float(state["unit"])  # type: ignore[arg-type]
        self._mean = np.array(state["mean"], dtype=np.float64).reshape(2)
        self._covariance = np.array(state["covariance"], dtype=np.float64).reshape(2, 2)

    @staticmethod
    def _at(reference: float) -> Floats:
        return np.array([reference, reference - 1.0])
