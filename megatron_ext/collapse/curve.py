"""The normalised loss curve l(t) = L(tT)/L(T) of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.controls import Controls, controls_of
from megatron_ext.collapse.form import Form
from megatron_ext.collapse.history import History, Split
from megatron_ext.errors import UsageError

SMOOTH_STEPS = 100.0
"""Width of the moving average in steps, as in the paper's plots (arXiv 2509.25087)."""
MOST_POINTS = 2000
"""A curve keeps at most this many points, each a mean over as many of the history."""
IGNORED = 0.2
"""Errors are measured from this fraction on; before it lie warm-up and noise (the paper's 20%)."""


class NormalisedLoss(Protocol):
    """Anything that gives a normalised loss at fractions of training."""

    def at(self, t: Floats) -> Floats:
        """Normalised loss at `t`."""
        ...


@dataclass(frozen=True)
class Curve:
    """A normalised loss curve, by points or by the parameters of a form.

    Attributes:
        source: what it came from.
        split: training or validation loss.
        controls: what decides its shape.
        final_loss: L(T), nats per token; None for a curve that stands for no single run.
        final_loss_error: standard error of `final_loss` from the noise around it, relative.
        smooth_steps: width of the moving average that was applied, in steps.
        t: fractions of training, increasing; empty where only `form` is known.
        l: normalised loss at `t`.
        form: parameters of the fitted form, or None.
        notes: what was repaired or assumed.
    """

    source: str
    split: Split = "train"
    controls: Controls = field(default_factory=Controls)
    final_loss: float | None = None
    final_loss_error: float = 0.0
    smooth_steps: float = SMOOTH_STEPS
    t: Floats = field(default_factory=lambda: np.empty(0))
    l: Floats = field(default_factory=lambda: np.empty(0))  # noqa: E741 (the paper's name)
    form: Form | None = None
    notes: tuple[str, ...] = ()

    @property
    def span(self) -> tuple[float, float]:
        """Part of training that the curve covers."""
        return (float(self.t[0]), float(self.t[-1])) if self.t.size else (0.0, 1.0)

    def at(self, t: Floats) -> Floats:
        """Normalised loss at fractions `t`, linear between points and held beyond them."""
        if self.t.size:
            return np.interp(t, self.t, self.l)
        if self.form is None or self.controls.schedule is None:
            raise UsageError(f"{self.source}: has neither points nor a form with its schedule")
        return self.form.at(np.asarray(t, dtype=np.float64), self.controls.schedule)


def moving_average(steps: Floats, values: Floats, width: float) -> Floats:
    """Mean over the points within `width` / 2 steps on either side of each.

    Where the points are further apart than that they stay as they are. At the ends the window
    shrinks on both sides alike, so that a slope there does not become a bias.

    Args:
        steps: increasing.
        values: one per step.
        width: of the window, in steps.
    """
    half = np.minimum(width / 2, np.minimum(steps - steps[0], steps[-1] - steps))
    first = np.searchsorted(steps, steps - half, side="left")
    behind = np.searchsorted(steps, steps + half, side="right")
    # Sums of deviations: sums of a million losses would lose digits.
    centre = float(values.mean())
    sums = np.concatenate(([0.0], np.cumsum(values - centre)))
    return np.asarray(centre + (sums[behind] - sums[first]) / (behind - first))


def smoothed(history: History, width: float = SMOOTH_STEPS) -> Floats:
    """The losses of a history, training losses averaged over `width` steps."""
    if history.split == "validation":
        return history.losses
    return moving_average(history.steps, history.losses, width)


def final_loss_of(history: History, width: float = SMOOTH_STEPS) -> tuple[float, float]:
    """L(T): the mean of the last `width` steps; of validation losses the last one.

    Returns:
        The loss in nats per token and its relative standard error, from the scatter of
        neighbouring points.
    """
    if history.split == "validation":  # a point is a mean over the whole set already
        width = 0.0
    last = history.steps >= history.steps[-1] - max(width, 0.0)
    count = int(last.sum())
    final = float(history.losses[last].mean())
    tail = history.losses[-max(count, min(50, history.losses.size)) :]
    noise = float(np.median(np.abs(np.diff(tail)))) * 1.4826 / np.sqrt(2) if tail.size > 1 else 0.0
    return final, noise / np.sqrt(count) / final


def make_curve(
    history: History, given: Controls | None = None, smooth_steps: float = SMOOTH_STEPS
) -> Curve:
    """Normalise a finished run.

    Args:
        history: the run.
        given: controls that the user states; they replace those read from the history.
        smooth_steps: width of the moving average, in steps.

    Raises:
        UsageError: The run is not finished, so that its final loss is not known.
    """
    if not history.is_complete:
        raise UsageError(
            f"{history.source}: ends at {float(history.steps[-1]):.0f} of {history.end:.0f} steps; "
            "a curve needs the final loss"
        )
    controls, notes = controls_of(history)
    final, error = final_loss_of(history, smooth_steps)
    smooth = smoothed(history, smooth_steps)
    t, values = thin(history.fractions, smooth / final, MOST_POINTS)
    return Curve(
        source=history.source,
        split=history.split,
        controls=controls.with_given(given or Controls()),
        final_loss=final,
        final_loss_error=error,
        smooth_steps=smooth_steps,
        t=t,
        l=values,
        notes=(*history.notes, *notes),
    )


def thin(t: Floats, values: Floats, most: int) -> tuple[Floats, Floats]:
    """At most `most` points, each the mean over an equal part of training; the last one stays."""
    if t.size <= most:
        return t, values
    edges = np.linspace(0.0, float(t[-1]), most)
    bins = np.searchsorted(edges, t[:-1], side="left")
    _, starts, counts = np.unique(bins, return_index=True, return_counts=True)
    thinned_t = np.add.reduceat(t[:-1], starts) / counts
    thinned = np.add.reduceat(values[:-1], starts) / counts
    return np.append(thinned_t, t[-1]), np.append(thinned, values[-1])


def mean_deviation(t: Floats, losses: Floats, final: float, reference: NormalisedLoss) -> float:
    """Mean |l - l_ref| over the points with t >= 0.2, as a fraction (0.001 is 0.1%).

    Raises:
        UsageError: No point lies there.
    """
    late = t >= IGNORED
    if not late.any():
        raise UsageError(f"no point at or after {IGNORED} of the run to compare")
    return float(np.abs(losses[late] / final - reference.at(t[late])).mean())
