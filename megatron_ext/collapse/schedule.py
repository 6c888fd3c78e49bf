"""Learning-rate schedules as functions of the fraction of training, scaled to a peak of 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ext.collapse.arrays import Floats
from megatron_ext.errors import UsageError

STYLES = ("linear", "cosine", "constant", "inverse-square-root", "wsd")
"""Shapes after warm-up, by Megatron's names (its ``WSD`` in lower case)."""


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule by name: linear warm-up, then one of `STYLES`.

    Attributes:
        style: one of `STYLES`.
        warmup: fraction of training until the peak, in [0, 1).
        floor: learning rate at the end over the peak; 0 is decay to zero (D2Z).
        decay: for ``wsd`` the fraction of training over which the rate decays at the end.
    """

    style: str
    warmup: float = 0.0
    floor: float = 0.0
    decay: float = 0.2

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise UsageError(f"schedule {self.style!r} is none of {', '.join(STYLES)}")
        for name in ("warmup", "floor", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(
                    f"schedule {self.style}: {name} {getattr(self, name)} is not in 0-1"
                )

    @property
    def span(self) -> tuple[float, float]:
        """Part of training over which the schedule is known: all of it."""
        return (0.0, 1.0)

    def at(self, t: Floats) -> Floats:
        """Learning rate over its peak at fractions `t` of training."""
        t = np.clip(np.asarray(t, dtype=np.float64), 0.0, 1.0)
        left = (1.0 - t) / max(1.0 - self.warmup, 1e-12)
        if self.style == "linear":
            after = self.floor + (1 - self.floor) * left
        elif self.style == "cosine":
            after = self.floor + (1 - self.floor) * 0.5 * (1 - np.cos(math.pi * left))
        elif self.style == "inverse-square-root":
            start = max(self.warmup, 1e-3)
            after = np.maximum(np.sqrt(start / np.maximum(t, start)), self.floor)
        elif self.style == "wsd":
            in_decay = np.clip((1.0 - t) / max(self.decay, 1e-12), 0.0, 1.0)
            after = self.floor + (1 - self.floor) * in_decay
        else:
            after = np.ones_like(t)
        rising = t / self.warmup if self.warmup > 0 else np.ones_like(t)
        return np.where(t < self.warmup, rising, after)


@dataclass(frozen=True)
class SampledSchedule:
    """A schedule as logged: points between which it is linear.

    Attributes:
        t: fractions of training, increasing.
        eta: learning rate over its peak at `t`.
    """

    t: tuple[float, ...]
    eta: tuple[float, ...]

    @property
    def span(self) -> tuple[float, float]:
        """Part of training over which the schedule is known."""
        return (self.t[0], self.t[-1])

    def at(self, t: Floats) -> Floats:
        """Learning rate over its peak at fractions `t`; held at the ends of what is known."""
        return np.interp(t, self.t, self.eta)


type Schedule = NamedSchedule | SampledSchedule


def sample_schedule(t: Floats, rates: Floats, peak: float | None) -> tuple[Schedule | None, int]:
    """A schedule from logged learning rates.

    Args:
        t: fractions of training.
        rates: learning rates at `t`; NaN where none was logged.
        peak: the peak where it is known. Logged rates above it are left out: a writer that cuts
            numbers to a width turns 9.7e-05 into 9.7.

    Returns:
        The schedule, None where fewer than four rates are usable, and how many were left out.
    """
    known = np.isfinite(rates) & (rates >= 0)
    usable = known.copy()
    if peak is not None:
        usable &= rates <= 1.05 * peak
    elif known.any():
        usable &= rates <= 100 * float(np.median(rates[known]))
    left_out = int(known.sum() - usable.sum())
    if int(usable.sum()) < 4 or not (rates[usable] > 0).any():
        return None, left_out
    t, rates = t[usable], rates[usable]
    top = peak if peak is not None else float(rates.max())
    keep = np.unique(np.linspace(0, t.size - 1, 200).astype(int))
    eta = rates[keep] / top
    return SampledSchedule(tuple(t[keep].tolist()), tuple(eta.tolist())), left_out


def parse_schedule(text: str, warmup: float = 0.0, floor: float | None = None) -> NamedSchedule:
    """Read ``linear``, ``cosine:0.1`` (decay to a tenth) or ``wsd:0:0.2`` (last fifth decays).

    Args:
        text: style, then optionally the floor and for ``wsd`` the decaying fraction.
        warmup: fraction of training until the peak.
        floor: learning rate at the end over the peak, where `text` does not say.

    Raises:
        UsageError: There is no such style, or a number is none.
    """
    style, *numbers = text.strip().lower().replace("_", "-").split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        raise UsageError(f"schedule {text!r}: {':'.join(numbers)} are no numbers") from None
    if len(values) > 2:
        raise UsageError(f"schedule {text!r}: has more than STYLE:FLOOR:DECAY")
    given = {"floor": values[0]} if values else {} if floor is None else {"floor": floor}
    if len(values) > 1:
        given["decay"] = values[1]
    return NamedSchedule(style, warmup=warmup, **given)
