"""What happened in a run besides its loss, to say what is near an alarm."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.history import History

MOST_EVENTS = 2000
"""Older events than the latest so many are forgotten."""
MOST_NAMED = 5
"""An alarm names at most so many events."""
RATE_JUMP = 0.2
"""A learning rate that goes on otherwise than the last two did, by this fraction, has jumped."""
NORM_FACTOR = 3.0
"""A gradient norm this many times the usual one is named."""
NEAR = 0.01
"""An event within this fraction of training of an alarm's start is near it."""


class Timeline:
    """Events by step; add them in order."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._texts: list[str] = []

    def add(self, step: int, text: str) -> None:
        """Note that something happened at a step."""
        place = bisect.bisect_right(self._steps, step)
        self._steps.insert(place, step)
        self._texts.insert(place, text)
        del self._steps[:-MOST_EVENTS], self._texts[:-MOST_EVENTS]

    def near(self, first: float, last: float) -> tuple[str, ...]:
        """Events between two steps, inclusive, each with its step."""
        begin = bisect.bisect_left(self._steps, first)
        end = bisect.bisect_right(self._steps, last)
        found = [
            f"{text} at step {step}"
            for step, text in zip(self._steps[begin:end], self._texts[begin:end], strict=True)
        ]
        if len(found) > MOST_NAMED:
            found = [*found[:MOST_NAMED], f"{len(found) - MOST_NAMED} more events"]
        return tuple(found)

    def state(self) -> list[list[int | str]]:
        """What a checkpoint keeps."""
        return [[s, t] for s, t in zip(self._steps, self._texts, strict=True)]

    def restore(self, state: Iterable[tuple[int, str]]) -> None:
        """Go on from `state`."""
        pairs = [(int(step), str(text)) for step, text in state]
        self._steps = [step for step, _ in pairs]
        self._texts = [text for _, text in pairs]


class Watch:
    """Turns what is logged beside the loss, step by step, into events of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._rates: list[float] = []
        self._batch: float | None = None
        self._norms: list[float] = []

    def rate(self, step: int, rate: float) -> None:
        """Take a learning rate in."""
        self._rates = [*self._rates[-2:], rate]
        if len(self._rates) == 3 and self._rates[0] > 0 and self._rates[1] > 0:
            expected = self._rates[1] ** 2 / self._rates[0]
            if abs(rate / expected - 1) > RATE_JUMP and abs(rate / self._rates[1] - 1) > RATE_JUMP:
                self._timeline.add(step, f"learning rate {self._rates[1]:.3g} -> {rate:.3g}")

    def batch(self, step: int, size: float) -> None:
        """Take a batch size in."""
        if self._batch is not None and size != self._batch:
            self._timeline.add(step, f"batch size {self._batch:g} -> {size:g}")
        self._batch = size

    def norm(self, step: int, norm: float) -> None:
        """Take a gradient norm in."""
        if len(self._norms) >= 16 and norm > NORM_FACTOR * float(np.median(self._norms)):
            self._timeline.add(step, f"gradient norm {norm:.3g}")
        self._norms = [*self._norms[-63:], norm]

    def skipped(self, step: int, count: float) -> None:
        """Take a number of skipped steps in."""
        if count > 0:
            self._timeline.add(step, f"{count:.0f} skipped steps")

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {"rates": self._rates, "batch": self._batch, "norms": self._norms}

    def restore(self, state: dict[str, list[float] | float | None]) -> None:
        """Go on from `state`."""
        rates, batch, norms = state["rates"], state["batch"], state["norms"]
        assert isinstance(rates, list)
        assert isinstance(norms, list)
        assert not isinstance(batch, list)
        self._rates, self._batch, self._norms = rates, batch, norms


def near_in_history(history: History, started: int) -> tuple[str, ...]:
    """What happened in a history within 1% of training of a step, or within three points of it."""
    place = int(np.searchsorted(history.steps, started))
    width = NEAR * history.end
    low = min(started - width, float(history.steps[max(place - 3, 0)]))
    high = max(started + width, float(history.steps[min(place + 3, history.steps.size - 1)]))
    timeline = Timeline()
    for step in history.restarts:
        timeline.add(int(step), "restart")
    for step in history.bad_steps:
        if low <= step <= high:
            timeline.add(int(step), "loss that is no positive number")
    # Some points before, to know what is usual.
    part = slice(
        max(int(np.searchsorted(history.steps, low)) - 64, 0),
        int(np.searchsorted(history.steps, high, side="right")),
    )
    steps = history.steps[part]
    if steps.size > 1:
        gap = int(np.argmax(np.diff(steps)))
        if steps[gap + 1] - steps[gap] > max(20 * np.median(np.diff(steps)), width):
            timeline.add(int(steps[gap + 1]), "first point after a gap")
    watch = Watch(timeline)
    takes = {
        "lr": watch.rate,
        "batch_size": watch.batch,
        "grad_norm": watch.norm,
        "skipped": watch.skipped,
    }
    for role, take in takes.items():
        values: Floats | None = history.extras.get(role)
        if values is not None:
            for step, value in zip(steps.tolist(), values[part].tolist(), strict=True):
                if np.isfinite(value):
                    take(int(step), value)
    found = timeline.near(low, high)
    samples = history.extras.get("samples")
    if samples is not None and np.isfinite(samples[min(place, samples.size - 1)]):
        return (*found, f"data position {samples[min(place, samples.size - 1)]:.0f} samples")
    if history.tokens is not None:
        position = history.tokens[min(place, history.tokens.size - 1)]
        return (*found, f"data position {position:.3g} tokens")
    return found
