"""Schedules that can be simulated: every hint of the runtime, and GPipe to compare with."""

from __future__ import annotations

from megatron_ext.pipeline.hints import (
    HINTS,
    Hint,
    OneForwardOneBackward,
    Place,
    ReadySet,
    find_hint,
)
from megatron_ext.pipeline.task import Task


class AllForwardsFirst(Hint):
    """GPipe: all forwards of the batch, then all backwards; it holds the whole batch."""

    live_limit = "p"
    fixed_order = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._forwards_left = place.microbatches * place.chunks

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        if ready.forwards:
            self._forwards_left -= 1
            return ready.forward
        return None if self._forwards_left else ready.backward


SCHEDULES: dict[str, type[Hint]] = {**HINTS, "gpipe": AllForwardsFirst}


def find_schedule(name: str) -> type[Hint]:
    """The schedule of that name, or the subclass of `Hint` that ``module:Name`` names.

    Raises:
        ValueError: There is none.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    if ":" in name:
        return find_hint(name)
    raise ValueError(
        f"no schedule {name!r}; there are {', '.join(SCHEDULES)}, and yours as module:Name"
    )


def least_limit(hint: type[Hint], stages: int, microbatches: int, chunks: int) -> int:
    """Microbatches that a schedule holds whatever its limit: 1 unless its order is fixed."""
    if hint is AllForwardsFirst:
        return microbatches
    if hint is OneForwardOneBackward and chunks > 1:
        warm_up = 2 * (stages - 1) + (chunks - 1) * stages
        return min(microbatches, -(-(warm_up + 1) // chunks))
    return 1
