"""`scripts/pretrain_gpt.py` with linear layers that delay weight gradients as Transformer Engine's.

Transformer Engine itself runs on GPUs only. These layers have its interface (`wgrad_store`,
`backward_dw`, `register_wgrad_accumulation_and_reduce_hooks`, parameters marked with
`skip_backward_post_hook`), so that Megatron's data parallelism and our tasks are the real ones.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import pretrain_gpt
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import layers

from megatron_ext import hooks
from megatron_ext.hook import install


class WeightGradStore:
    def __init__(self, enabled: bool) -> None:
        self.context: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue()
        self.enabled = enabled

    def delay_wgrad_compute(self) -> bool:
        return self.enabled


class DelayedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        return input.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        store = ctx.layer.wgrad_store
        flat = gradient.flatten(0, -2), input.flatten(0, -2)
        if not store.enabled:
            return gradient.matmul(weight), flat[0].t().matmul(flat[1]), None
        store.context.put(flat)
        return gradient.matmul(weight), None, None


class Delaying:
    """What both layers have of Transformer Engine's."""

    def set_up(self, config: Any) -> None:
        self.wgrad_store = WeightGradStore(config.delay_wgrad_compute)
        self.hooks: list[Callable[[], None]] = []
        self.weight: torch.nn.Parameter
        if self.wgrad_store.enabled:
            self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def _forward_impl(self, input: torch.Tensor, weight: Any, bias: Any, **_: Any) -> torch.Tensor:
        output = DelayedMatmul.apply(input, weight, self)
        return output if bias is None else output + bias  # type: ignore[no-any-return]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)

    def backward_dw(self) -> None:
        gradient, input = self.wgrad_store.context.get_nowait()
        self.weight.grad = gradient.t().matmul(input)
        print("computed a delayed weight gradient")
        for hook in self.hooks:
            hook()


class DelayingColumn(Delaying, layers.ColumnParallelLinear):  # type: ignore[misc]
    def __init__(self, *args: Any, config: Any, **named: Any) -> None:
        super().__init__(*args, config=config, **named)
        self.set_up(config)


class DelayingRow(Delaying, layers.RowParallelLinear):  # type: ignore[misc]
    def __init__(self, *args: Any, config: Any, **named: Any) -> None:
        super().__init__(*args, config=config, **named)
        self.set_up(config)


start_grad_sync = _ParamAndGradBucketGroup.start_grad_sync


def start_counted(self: Any, **named: Any) -> Any:
    """Megatron learns in the first iteration how often each gradient is reported, and reduces at
    that count: one reported more than once may be reduced before it is complete.
    """
    counts = getattr(self, "per_param_grad_ready_counts", {})
    assert set(counts.values()) <= {1}, f"gradients reported as complete {counts.values()} times"
    return start_grad_sync(self, **named)


_ParamAndGradBucketGroup.start_grad_sync = start_counted

for module in (backends, gpt_layer_specs):
    for name, layer in (
        ("ColumnParallelLinear", DelayingColumn),
        ("RowParallelLinear", DelayingRow),
    ):
        if hasattr(module, name):
            setattr(module, name, layer)

if __name__ == "__main__":
    if "rrfp" in sys.argv and "bf" not in sys.argv:
        # As with --transformer-impl transformer_engine and a hint that splits.
        install(hooks.TRANSFORMER_ENGINE_HOOKS)
    pretrain_gpt.main()
