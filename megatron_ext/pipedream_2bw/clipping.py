"""Whose gradient norm clips the update of a stage."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from megatron_ext.pipedream_2bw.leaf_optimizers import leaf_optimizers


def clip_by(how: str, optimizer: Any) -> None:
    """Let an optimizer clip as ``--pipedream-2bw-clip`` says.

    Args:
        how: ``exact`` leaves it as it is; with ``stage`` the norm is over the ranks of this
            pipeline stage, and so it is with ``off``, where it is only reported.
        optimizer: Megatron's optimizer, plain or chained.
    """
    if how == "exact":
        return
    for one in leaf_optimizers(optimizer):
        one.grad_stats_parallel_group = _stage_group(one)
        if how == "off":
            one.config.clip_grad = 0.0
    if how == "off":
        optimizer.config.clip_grad = 0.0


def _stage_group(one: Any) -> Any:
    """The ranks of this stage over which the gradients of an optimizer are spread."""
    if type(one).__name__ == "DistributedOptimizer":
        return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_tensor_model_parallel_group()
