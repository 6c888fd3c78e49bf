"""When the update of a batch may run on a stage: what it waits for from other ranks."""

from __future__ import annotations

from megatron_ext.simulate.pipeline import Clipping, Pipeline


class Updates:
    """Counts which stages have ended which batch.

    A stage's gradients are reduced over the replicas once all of them have ended the batch there.
    With exact clipping, an update waits until that is done on all stages, and for the norm.
    """

    def __init__(self, pipeline: Pipeline, clipping: Clipping) -> None:
        self._stages = pipeline.stages
        self._replicas = pipeline.replicas
        self._reduction = pipeline.reduction
        self._norm_latency = pipeline.norm_latency
        self._exact = clipping is Clipping.EXACT
        self._ranks_left = [[self._replicas] * self._stages for _ in range(pipeline.iterations)]
        self._stages_left = [self._stages] * pipeline.iterations
        self._latest = [0.0] * pipeline.iterations
        self.ended = [0.0] * pipeline.iterations
        """When the last task of each batch was done, on any stage."""

    def batch_ended(self, stage: int, batch: int, now: float) -> tuple[float, range] | None:
        """Note that a replica of `stage` has run its last task of `batch`.

        Returns:
            If that lets updates run: when, and on which stages, of all replicas.
        """
        self.ended[batch] = max(self.ended[batch], now)
        left = self._ranks_left[batch]
        left[stage] -= 1
        if left[stage]:
            return None
        reduced = now + self._reduction
        if not self._exact:
            return reduced, range(stage, stage + 1)
        self._latest[batch] = max(self._latest[batch], reduced)
        self._stages_left[batch] -= 1
        if self._stages_left[batch]:
            return None
        return self._latest[batch] + self._norm_latency, range(self._stages)
