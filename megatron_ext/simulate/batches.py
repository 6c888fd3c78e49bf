"""The arbiters of a stage over several batches: one per batch, or one that never drains.

With a flush after every batch a stage has a new arbiter for each. Under 2BW it has one for all, as
the runtime does: a batch is let in when the batch two before it is updated, whose weights it uses.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import Place
from megatron_ext.simulate.pipeline import Clipping, Pipeline, Policy


class Batches:
    """Makes the arbiters of all stages, and lets batches in."""

    def __init__(self, pipeline: Pipeline, policy: Policy) -> None:
        self._pipeline = pipeline
        self._continuous = policy.pipedream_2bw
        # Without exact clipping there is one gradient buffer, and the next batch waits for it.
        self._holds_backwards = policy.clipping is not Clipping.EXACT
        self._hint = policy.hint_class
        self._limits = policy.limits(pipeline.stages, pipeline.chunks)

    @property
    def drains_after(self) -> int:
        """Microbatches after which the pipeline is empty."""
        pipeline = self._pipeline
        return pipeline.all_microbatches if self._continuous else pipeline.microbatches

    def first(self, stage: int) -> Arbiter:
        """The arbiter with which a stage begins."""
        arbiter = self._make(stage)
        if self._continuous:
            self._finish(arbiter, 0)
        return arbiter

    def updated(self, arbiter: Arbiter, batch: int) -> Arbiter | None:
        """What a stage goes on with after the update of `batch`; None if that was all.

        Returns:
            Under 2BW `arbiter` itself with another batch let in, else one for the next batch.
        """
        if self._continuous:
            arbiter.updated()
            update = arbiter.choose()
            assert update is not None
            arbiter.completed(update)
        if batch + 1 == self._pipeline.iterations:
            return None
        if not self._continuous:
            return self._make(arbiter.place.stage)
        self._finish(arbiter, batch + 1)
        return arbiter

    def _finish(self, arbiter: Arbiter, batch: int) -> None:
        """Finish this batch first, and let the next one in, if there is one."""
        pipeline = self._pipeline
        arbiter.must_end((batch + 1) * pipeline.microbatches, self._holds_backwards)
        if batch + 1 < pipeline.iterations:
            arbiter.extend(pipeline.microbatches)

    def _make(self, stage: int) -> Arbiter:
        pipeline = self._pipeline
        place = Place(
            stage, pipeline.stages, pipeline.microbatches, self._limits[stage], pipeline.chunks
        )
        # A fixed order is one over all batches, or it would end with the first.
        return Arbiter(place, self._hint(replace(place, microbatches=self.drains_after)))
