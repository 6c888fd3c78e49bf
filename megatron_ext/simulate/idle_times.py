"""Why stages wait: every wait is put down to one cause."""

from __future__ import annotations

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.simulate.outcome import Cause

_NOT_WAITING = -1.0


class IdleTimes:
    """Waits of all stages, by cause.

    A wait belongs to what ended it: a forward, for whose input the stage had waited, or a backward.
    One that a backward ended is further told apart by what had kept forwards from filling it.
    """

    def __init__(self, ranks: int) -> None:
        self.since = [_NOT_WAITING] * ranks
        """When the wait that goes on began; negative if there is none."""
        self.by_cause = [[0.0] * len(Cause) for _ in range(ranks)]
        self._backward_cause = [Cause.FILL] * ranks

    def begin(
        self,
        rank: int,
        now: float,
        arbiter: Arbiter,
        forwards_done: int,
        drains_after: int,
        fixed_order: bool,
    ) -> None:
        """Nothing is ready on a stage.

        Args:
            rank: The stage.
            now: When.
            arbiter: Its arbiter.
            forwards_done: By that arbiter.
            drains_after: How many there are until the pipeline is empty.
            fixed_order: Whether the order is fixed, so that no limit holds anything back.
        """
        self.since[rank] = now
        awaited = arbiter.awaited()
        if arbiter.ready.last is None:
            cause = Cause.FILL
        elif forwards_done == drains_after:
            cause = Cause.DRAIN
        elif forwards_done == arbiter.end * arbiter.place.chunks or not awaited:
            cause = Cause.UPDATE
        elif fixed_order or any(task.kind is Kind.FORWARD for task in awaited):
            cause = Cause.BACKWARD
        else:
            cause = Cause.MEMORY
        self._backward_cause[rank] = cause

    def end(self, rank: int, now: float, task: Task) -> None:
        """`task` ends the wait of a stage."""
        cause = self._backward_cause[rank]
        if task.kind is Kind.FORWARD and cause is not Cause.FILL:
            cause = Cause.FORWARD
        self.by_cause[rank][cause] += now - self.since[rank]
        self.since[rank] = _NOT_WAITING

    def end_by_update(self, rank: int, now: float, batch_ended: float) -> None:
        """An update, or the end of the run, ends the wait of a stage.

        Args:
            rank: The stage.
            now: When.
            batch_ended: When the last stage had run its last task of the batch.
        """
        since = self.since[rank]
        cause = self._backward_cause[rank]
        if cause is Cause.DRAIN:
            drained = min(max(batch_ended, since), now)
            self.by_cause[rank][Cause.DRAIN] += drained - since
            self.by_cause[rank][Cause.UPDATE] += now - drained
        else:
            self.by_cause[rank][cause] += now - since
        self.since[rank] = _NOT_WAITING
