"""From the losses of single steps to observations: means over equal parts of training.

A run of a million steps and one of a thousand give the test about equally many observations, each
about as independent of the last as the losses are. Fewer points than parts stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ext.collapse.arrays import Floats

PARTS = 400
"""Parts that training is divided into."""


@dataclass(frozen=True)
class Observation:
    """The mean of some neighbouring points.

    Attributes:
        t: mean fraction of training.
        loss: mean loss, nats per token.
        step: last step in it.
        count: number of points in it.
    """

    t: float
    loss: float
    step: int
    count: int = 1


class Binner:
    """Makes observations as points come; gives one when its part of training is over."""

    def __init__(self) -> None:
        self._part = -1
        self._t = self._loss = 0.0
        self._step = self._count = 0

    def add(self, t: float, loss: float, step: int) -> Observation | None:
        """Take a point in; points come in order."""
        part = _part_of(t)
        done = self.flush() if part != self._part else None
        self._part = part
        self._t += t
        self._loss += loss
        self._step = step
        self._count += 1
        return done

    def flush(self) -> Observation | None:
        """What has been taken in since the last observation, if anything."""
        if not self._count:
            return None
        done = Observation(self._t / self._count, self._loss / self._count, self._step, self._count)
        self._t = self._loss = 0.0
        self._count = 0
        return done

    def state(self) -> dict[str, float | int]:
        """What a checkpoint keeps."""
        return {
            "part": self._part,
            "t": self._t,
            "loss": self._loss,
            "step": self._step,
            "count": self._count,
        }

    def restore(self, state: dict[str, float | int]) -> None:
        """Go on from `state`."""
        self._part, self._step = int(state["part"]), int(state["step"])
        self._t, self._loss = float(state["t"]), float(state["loss"])
        self._count = int(state["count"])


def observe_all(t: Floats, losses: Floats, steps: Floats) -> list[Observation]:
    """The observations of a whole history, as a `Binner` would give them.

    The last part counts only if it holds at least half as many points as usual: its mean would be
    noisier than the others.
    """
    parts = _parts_of(t)
    starts = np.flatnonzero(np.diff(parts, prepend=-1))
    counts = np.diff(starts, append=t.size)
    if counts.size > 1 and 2 * counts[-1] < np.median(counts[:-1]):
        starts, counts = starts[:-1], counts[:-1]
        t, losses = t[: counts.sum()], losses[: counts.sum()]
    mean_t = np.add.reduceat(t, starts) / counts
    mean_loss = np.add.reduceat(losses, starts) / counts
    last = steps[starts + counts - 1]
    return [
        Observation(float(a), float(b), int(c), int(n))
        for a, b, c, n in zip(mean_t, mean_loss, last, counts, strict=True)
    ]


def _part_of(t: float) -> int:
    # Rounded, so that t = 0.3 computed in two ways falls into one part.
    return int(round(t * PARTS, 9))


def _parts_of(t: Floats) -> Floats:
    return np.floor(np.round(t * PARTS, 9))
