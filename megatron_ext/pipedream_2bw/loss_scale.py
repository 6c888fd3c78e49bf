"""Loss scaling for fp16 when the scale changes while the next batch is under way."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ext.pipedream_2bw.leaf_optimizers import leaf_optimizers


class LossScales:
    """One loss scale for all microbatches of a batch, and for its update.

    Megatron's grad scaler changes its scale in every update. By then the next batch has begun with
    the one before, so each batch keeps the scale it began with.

    Args:
        optimizer: Megatron's optimizer, plain or chained.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._scalers: list[_ScalerOfBatch] = []
        for one in leaf_optimizers(optimizer):
            if getattr(one, "grad_scaler", None) is not None:
                one.grad_scaler = _ScalerOfBatch(one.grad_scaler)
                self._scalers.append(one.grad_scaler)

    def begin(self) -> torch.Tensor:
        """The scale for a batch that begins now."""
        scale: torch.Tensor = self._optimizer.get_loss_scale().clone()
        return scale

    def update_with(self, scale: torch.Tensor | None) -> None:
        """The scale of the batch whose gradients are next unscaled; None is the newest."""
        for scaler in self._scalers:
            scaler.scale_of_batch = scale


class _ScalerOfBatch:
    """Megatron's grad scaler, unscaling by the scale of the batch."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self.scale_of_batch: torch.Tensor | None = None

    @property
    def inv_scale(self) -> torch.Tensor:
        scale = self.scale_of_batch
        if scale is None:
            scale = self._scaler.scale
        return scale.double().reciprocal().float()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)
