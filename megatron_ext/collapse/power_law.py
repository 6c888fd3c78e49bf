"""The final loss of a larger run from a power law over smaller ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from megatron_ext.errors import UsageError


@dataclass(frozen=True)
class PowerLaw:
    """L(N) = floor + scale N^-exponent.

    Attributes:
        floor: the irreducible loss, nats per token; 0 where two runs are all there is.
        scale: loss over the floor at N = 1.
        exponent: above 0.
        error: standard deviation of what is left, relative; 0 where nothing can be left.
        points: number of runs it is fitted to.
    """

    floor: float
    scale: float
    exponent: float
    error: float
    points: int

    def at(self, size: float) -> float:
        """Loss of a model with `size` parameters, nats per token."""
        return self.floor + self.scale * math.pow(size, -self.exponent)


def fit_power_law(sizes: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Fit final losses over numbers of parameters at the same tokens per parameter.

    With two sizes a pure power law, from three on with an irreducible loss where it lowers the
    error.

    Raises:
        UsageError: Fewer than two different sizes, or the loss does not fall with size.
    """
    order = np.argsort(sizes)
    n = np.array(sizes, dtype=np.float64)[order]
    loss = np.array(losses, dtype=np.float64)[order]
    if np.unique(n).size < 2:
        raise UsageError("a power law needs final losses of at least two sizes")
    if not (n > 0).all() or not (loss > 0).all() or loss[-1] >= loss[0]:
        raise UsageError("no power law: the final loss does not fall with the number of parameters")

    def line(floor: float) -> tuple[float, float, float]:
        slope, offset = np.polyfit(np.log(n), np.log(loss - floor), 1)
        left = np.log(loss - floor) - (slope * np.log(n) + offset)
        # In units of the loss, or a floor close to the losses would seem to be worse.
        error = float(np.sqrt(np.mean((left * (loss - floor) / loss) ** 2)))
        return float(-slope), float(np.exp(offset)), error

    floors = [0.0]
    if np.unique(n).size >= 3:
        floors += np.linspace(0.0, 0.98 * float(loss.min()), 200)[1:].tolist()
    best = min(floors, key=lambda floor: line(floor)[2])
    exponent, scale, error = line(best)
    if exponent <= 0:
        raise UsageError("no power law: the final loss does not fall with the number of parameters")
    return PowerLaw(best, scale, exponent, error, n.size)


def size_for(law: PowerLaw, loss: float) -> float:
    """Number of parameters at which a power law reaches a loss.

    Raises:
        UsageError: It never does between 1 and 1e15 parameters.
    """
    if not law.at(1e15) < loss < law.at(1.0):
        raise UsageError(f"the power law does not reach a loss of {loss}")
    return float(np.exp(brentq(lambda x: law.at(float(np.exp(x))) - loss, 0.0, np.log(1e15))))
