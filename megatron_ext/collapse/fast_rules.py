"""Rules that need no reference: NaN, infinity, spikes and divergence of the raw loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import norm

from megatron_ext.collapse.alarm import Alarm
from megatron_ext.collapse.arrays import Floats

WINDOW = 128
"""Losses that a new one is compared with."""
LEAST = 32
"""Losses needed before there is a comparison."""
REFRESH = 64
"""Losses after which the comparison is renewed."""
LEAST_SIGMAS = 6.0
"""A spike exceeds the median by at least this many robust standard deviations: single losses have
heavier tails than the normal distribution, which the false-alarm rate alone would assume."""
LEAST_RISE = 0.1
"""And by at least this fraction of the median."""
PATIENCE = 16
"""So many losses in a row at spike height are a divergence."""


class FastRules:
    """Looks at every single loss.

    Args:
        rate: accepted chance of a false spike alarm in the whole run.
        length: number of losses expected in the whole run.
    """

    def __init__(self, rate: float, length: int) -> None:
        self._rate = rate
        self._sigmas = max(LEAST_SIGMAS, float(norm.isf(rate / max(length, 1))))
        self._recent: list[float] = []
        self._fresh = 0
        self._limit = math.inf
        self._median = math.nan
        self._above = 0
        self._above_from = (0.0, 0)
        self._highest = 0.0
        self._broken = ""

    def update(self, t: Floats, steps: Sequence[int] | Floats, losses: Floats) -> list[Alarm]:
        """Take losses in, one or a million.

        Args:
            t: fraction of training of each.
            steps: step of each.
            losses: nats per token; may be NaN or infinite.
        """
        alarms: list[Alarm] = []
        position = 0
        while position < losses.size:
            # To the next renewal in one piece where nothing in it stands out.
            behind = min(position + REFRESH - self._fresh, losses.size)
            piece = losses[position:behind]
            plain = bool((np.isfinite(piece) & (piece <= self._limit)).all())
            if plain and not self._above and not self._broken:
                self._accept(piece)
                position = behind
                continue
            for i in range(position, behind):
                alarm = self._single(float(t[i]), int(steps[i]), float(losses[i]))
                if alarm is not None:
                    alarms.append(alarm)
            position = behind
        return alarms

    def _single(self, t: float, step: int, loss: float) -> Alarm | None:
        if not math.isfinite(loss):
            kind = "nan" if math.isnan(loss) else "infinity"
            is_new, self._broken = self._broken != kind, kind
            return Alarm(t, step, kind, math.inf, 1.0, t, step) if is_new else None
        self._broken = ""
        if loss <= self._limit:
            self._above = 0
            self._accept(np.array([loss]))
            return None
        self._above += 1
        self._highest = max(self._highest, loss) if self._above > 1 else loss
        if self._above == 1:
            self._above_from = (t, step)
            return Alarm(t, step, "spike", loss / self._median - 1, 1 - self._rate, t, step)
        if self._above == PATIENCE:
            started_t, started = self._above_from
            size = self._highest / self._median - 1
            return Alarm(t, step, "divergence", size, 1 - self._rate, started_t, started)
        if self._above == PATIENCE + WINDOW:  # it has settled there; compare with that from now on
            self._recent, self._above, self._limit = [], 0, math.inf
        return None

    def _accept(self, losses: Floats) -> None:
        self._recent = (self._recent + losses.tolist())[-WINDOW:]
        self._fresh += losses.size
        if self._fresh < REFRESH:
            return
        self._fresh = 0
        if len(self._recent) >= LEAST:
            recent = np.array(self._recent)
            self._median = float(np.median(recent))
            sigma = 1.4826 * float(np.median(np.abs(recent - self._median)))
            rise = max(self._sigmas * sigma, LEAST_RISE * abs(self._median))
            self._limit = self._median + rise

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "recent": self._recent,
            "fresh": self._fresh,
            "limit": self._limit if math.isfinite(self._limit) else None,
            "median": self._median if math.isfinite(self._median) else None,
            "above": self._above,
            "above_from": list(self._above_from),
            "highest": self._highest,
            "broken": self._broken,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        limit, median = state["limit"], state["median"]
        self._recent = [float(loss) for loss in state["recent"]]
        self._fresh = int(state["fresh"])
        self._limit = math.inf if limit is None else float(limit)
        self._median = math.nan if median is None else float(median)
        self._above = int(state["above"])
        t, step = state["above_from"]
        self._above_from = (float(t), int(step))
        self._highest = float(state["highest"])
        self._broken = str(state["broken"])
