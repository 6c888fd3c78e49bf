"""A loss history: what a source holds once restarts, gaps and bad points are dealt with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_ext.collapse.arrays import Floats, Truths
from megatron_ext.errors import UsageError

type Split = Literal["train", "validation"]

GAP_FACTOR = 20.0
"""A hole this many times the usual spacing, and at least 1% of the run, is reported as a gap."""
GAP_FRACTION = 0.01


@dataclass(frozen=True)
class RawHistory:
    """A history as a source wrote it: in file order, with whatever it holds.

    Attributes:
        source: where it came from, for messages and curve files.
        steps: step of each point; iterations, or tokens where the source has nothing else.
        losses: loss of each point, nats per token; may be NaN or infinite.
        tokens: tokens seen at each point, or None.
        extras: further columns by name (``lr``, ``grad_norm``, ``batch_size``, ``skipped``, ...);
            NaN where missing.
        metadata: what is the same for the whole run (``params``, ``lr_peak``, ...), as written.
        split: whether these are training or validation losses.
        end_step: the last step planned, or None where the source does not say.
        notes: what the reader already repaired, one line each.
    """

    source: str
    steps: Floats
    losses: Floats
    tokens: Floats | None = None
    extras: dict[str, Floats] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    split: Split = "train"
    end_step: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class History(RawHistory):
    """A history with increasing steps and finite, positive losses.

    Attributes:
        restarts: steps at which the run went on from an earlier point, ascending.
        bad_steps: steps whose loss was NaN, infinite, zero or negative, ascending; they are not
            among `steps`.
        bad_losses: the losses at `bad_steps`.
    """

    restarts: tuple[float, ...] = ()
    bad_steps: tuple[float, ...] = ()
    bad_losses: tuple[float, ...] = ()

    @property
    def end(self) -> float:
        """Last step planned; where that is unknown, or was passed, the last step there is."""
        last = float(self.steps[-1])
        return last if self.end_step is None else max(self.end_step, last)

    @property
    def is_complete(self) -> bool:
        """Whether the last point lies within 1.5% of the planned end, or none is known."""
        return float(self.steps[-1]) >= 0.985 * self.end

    @property
    def fractions(self) -> Floats:
        """Fraction of training t in (0, 1] at each point: of its tokens where they are known."""
        if self.tokens is None:
            return np.asarray(self.steps / self.end)
        # Where tokens per step vary, the end in tokens is known only for what has been seen.
        per_step = self.tokens[-1] / self.steps[-1]
        return np.asarray(self.tokens / max(self.tokens[-1], per_step * self.end))

    def until(self, fraction: float) -> History:
        """The same run as if it had only come to `fraction` of its training so far."""
        keep = self.fractions <= fraction + 1e-12
        if not keep.any():
            raise UsageError(f"{self.source}: no point lies at or before {fraction} of the run")
        last = float(self.steps[keep][-1])
        return History(
            source=self.source,
            steps=self.steps[keep],
            losses=self.losses[keep],
            tokens=None if self.tokens is None else self.tokens[keep],
            extras={name: values[keep] for name, values in self.extras.items()},
            metadata=self.metadata,
            split=self.split,
            end_step=self.end,
            notes=self.notes,
            restarts=tuple(step for step in self.restarts if step <= last),
            bad_steps=tuple(step for step in self.bad_steps if step <= last),
            bad_losses=tuple(
                loss
                for step, loss in zip(self.bad_steps, self.bad_losses, strict=True)
                if step <= last
            ),
        )


def tidy(raw: RawHistory, end_step: float | None = None) -> History:
    """Put a history in order: the later of overlapping runs wins, bad points go, gaps are noted.

    A restart repeats steps that were already logged. Whatever was logged before at or after the
    step it goes on from is dropped, as the run that goes on never saw it.

    Args:
        raw: what a source holds.
        end_step: last step planned, if the user says so.

    Raises:
        UsageError: Fewer than two usable points are left.
    """
    if raw.steps.size == 0:
        raise UsageError(f"{raw.source}: holds no losses")
    notes = list(raw.notes)
    keep, restarts = _survivors(raw.steps)
    if restarts:
        dropped = int(raw.steps.size - keep.sum())
        notes.append(
            f"{len(restarts)} restart{'s' if len(restarts) > 1 else ''} at step "
            f"{_few(restarts)}: {dropped} overlapping points dropped, the later run wins"
        )
    steps, losses = raw.steps[keep], raw.losses[keep]
    good = np.isfinite(losses) & (losses > 0)
    bad = ~good
    if bad.any():
        notes.append(
            f"{int(bad.sum())} points without a finite positive loss left out, at step "
            f"{_few(steps[bad].tolist())}"
        )
    gaps = _gaps(steps[good])
    if gaps:
        spans = [f"{first:.0f}-{last:.0f}" for first, last in gaps[:3]]
        more = f" and {len(gaps) - 3} more" if len(gaps) > 3 else ""
        notes.append(f"no points between steps {', '.join(spans)}{more}")
    if int(good.sum()) < 2:
        raise UsageError(
            f"{raw.source}: has {int(good.sum())} usable points, at least 2 are needed"
        )
    if end_step is not None and end_step < steps[-1]:
        raise UsageError(
            f"{raw.source}: goes to step {steps[-1]:.0f}, beyond the given end {end_step:.0f}"
        )
    return History(
        source=raw.source,
        steps=steps[good],
        losses=losses[good],
        tokens=None if raw.tokens is None else raw.tokens[keep][good],
        extras={name: values[keep][good] for name, values in raw.extras.items()},
        metadata=raw.metadata,
        split=raw.split,
        end_step=raw.end_step if end_step is None else end_step,
        notes=tuple(notes),
        restarts=tuple(restarts),
        bad_steps=tuple(steps[bad].tolist()),
        bad_losses=tuple(losses[bad].tolist()),
    )


def _survivors(steps: Floats) -> tuple[Truths, list[float]]:
    """Which points no later point overtakes, and the steps at which the run went back."""
    if not np.isfinite(steps).all():
        raise UsageError("a step is not a finite number")
    lowest_later = np.minimum.accumulate(steps[::-1])[::-1]
    keep = np.ones(steps.size, dtype=np.bool_)
    # A point survives if every later point lies beyond it.
    keep[:-1] = steps[:-1] < lowest_later[1:]
    went_back = np.flatnonzero(np.diff(steps) < 0) + 1
    restarts = sorted({float(steps[i]) for i in went_back if keep[i]})
    return keep, restarts


def _gaps(steps: Floats) -> list[tuple[float, float]]:
    """Pairs of neighbouring steps with far more than the usual spacing between them."""
    if steps.size < 3:
        return []
    spacing = np.diff(steps)
    # The first point of a run may come late; a gap is a hole between points.
    least = max(GAP_FACTOR * float(np.median(spacing)), GAP_FRACTION * float(steps[-1]))
    return [(float(steps[i]), float(steps[i + 1])) for i in np.flatnonzero(spacing > least)]


def _few(values: list[float]) -> str:
    """The first values of a list, for a message."""
    words = ", ".join(f"{value:.0f}" for value in values[:3])
    return f"{words} and {len(values) - 3} more" if len(values) > 3 else words
