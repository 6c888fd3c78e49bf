"""The arbiters of a stage over several batches: one per batch, or one that never drains.

With a flush after every batch a stage has a new arbiter for each, as the runtime does. Under 2BW
it has one for all batches together, and a microbatch is admitted when the weights are there that
its batch uses: forwards of batch k + 2 need the update of batch k (docs/simulate.md).
"""

from __future__ import annotations

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import Place
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.simulate.pipeline import Pipeline, Policy


class GatedArbiter(Arbiter):
    """An arbiter that lets only the first `admitted` microbatches enter the stage."""

    admitted = 0

    def _may_enter(self, microbatch: int) -> bool:
        return microbatch < self.admitted and super()._may_enter(microbatch)


class PiecewiseArbiter(GatedArbiter):
    """Runs weight gradients in pieces, with other tasks in between, as if layer by layer.

    A microbatch is held until the last piece is done.
    """

    weight_pieces = 1
    _pieces_done = 0

    def completed(self, task: Task) -> None:
        """As in the base class; only the last piece of a weight gradient completes it."""
        if task.kind is Kind.WEIGHT:
            self._pieces_done = (self._pieces_done + 1) % self.weight_pieces
            if self._pieces_done:
                return
        super().completed(task)


class Batches:
    """Makes the arbiters of all stages, and says which batches they may work on.

    Microbatches are counted over all iterations, from 0. An arbiter that was made for batch k
    counts from the first microbatch of that batch.
    """

    def __init__(self, pipeline: Pipeline, policy: Policy) -> None:
        self._pipeline = pipeline
        self._continuous = policy.pipedream_2bw
        self._hint = policy.hint_class
        self._limits = policy.limits(pipeline.stages)

    def first(self, stage: int) -> GatedArbiter:
        """The arbiter with which a stage begins."""
        pipeline = self._pipeline
        if not self._continuous:
            return self._make(stage, pipeline.microbatches)
        arbiter = self._make(stage, pipeline.all_microbatches)
        arbiter.admitted = 2 * pipeline.microbatches
        return arbiter

    def updated(self, arbiter: GatedArbiter, batch: int) -> GatedArbiter | None:
        """What a stage goes on with after the update of `batch`; None if that was all.

        Returns:
            `arbiter` itself, with one more batch admitted, or a new one for the next batch.
        """
        pipeline = self._pipeline
        if self._continuous:
            arbiter.admitted = (batch + 3) * pipeline.microbatches
            return arbiter
        if batch + 1 == pipeline.iterations:
            return None
        return self._make(arbiter.place.stage, pipeline.microbatches)

    def _make(self, stage: int, microbatches: int) -> GatedArbiter:
        pipeline = self._pipeline
        place = Place(stage, pipeline.stages, microbatches, self._limits[stage], pipeline.chunks)
        hint = self._hint(place)
        if pipeline.weight_pieces == 1:
            arbiter = GatedArbiter(place, hint)
        else:
            arbiter = PiecewiseArbiter(place, hint)
            arbiter.weight_pieces = pipeline.weight_pieces
        arbiter.admitted = microbatches
        return arbiter
