"""Splits the backward of Megatron's linear layers: input gradient now, weight gradient later.

`split_linear` takes the place of the function that Megatron's column- and row-parallel layers and
its output layer compute with. Its autograd node does not know the weight, so a backward stops at
the input gradient and leaves the rest in the `WeightGradients` of its model chunk, from where a
task of its own takes it. Nothing else of a layer changes. Layers of Transformer Engine leave theirs
by an interface of their own (see `transformer_engine`); a layer that computes otherwise does its
whole backward at once.

The numbers are Megatron's: the same products, added to the same buffer in the same order.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron_ext.pipeline.transformer_engine import delayed_layers

_current: WeightGradients | None = None
Pause = Callable[[], contextlib.AbstractContextManager[None]]


def current() -> WeightGradients | None:
    """Where the task that is running leaves weight gradients; None if nothing is split."""
    return _current


@dataclass(frozen=True, slots=True)
class _Work:
    """Accumulates the gradients of some weights in one microbatch."""

    run: Callable[[], None]
    weights: Sequence[torch.Tensor]
    reports: bool
    """Whether it tells data parallelism of its weights by itself, in any microbatch."""


_DONE = _Work(lambda: None, (), False)


@dataclass(frozen=True, slots=True)
class _Deferred:
    """What one layer's weight gradient of one microbatch is made of."""

    weight: torch.nn.Parameter
    input: torch.Tensor
    output_gradient: torch.Tensor
    fused: bool
    """Whether a fused kernel adds straight to the main gradient."""
    gather: dist.ProcessGroup | None
    """Group over which the sequence dimension of `input` is split."""


class WeightGradients:
    """The weight gradients that backwards of one model chunk have left, by microbatch.

    Args:
        model: The chunk, as Megatron wraps it for data parallelism.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._delayed = delayed_layers(model)
        self._filling: list[_Work] = []
        self._waiting: deque[list[_Work]] = deque()
        self._pieces_done = 0

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Around a forward or backward of this chunk: split its linear layers."""
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before

    def put(
        self,
        run: Callable[[], None],
        weights: Sequence[torch.Tensor] = (),
        reports: bool = False,
    ) -> None:
        """Leave work for this microbatch's task.

        Args:
            run: Accumulates the gradients of `weights`.
            weights: What data parallelism is told of after the batch's last microbatch, once for
                each use in it, as Megatron's own hooks do.
            reports: Whether `run` tells data parallelism of them by itself, in any microbatch.
        """
        self._filling.append(_Work(run, weights, reports))

    def seal(self) -> None:
        """End a microbatch: what was left since the last call belongs together."""
        for layer in self._delayed:
            if entries := layer.count_new():
                self.put(functools.partial(layer.run, entries), layer.weights, reports=True)
        self._waiting.append(self._filling)
        self._filling = []

    def run(self, last: bool, pieces: int = 1, pause: Pause = contextlib.nullcontext) -> bool:
        """Compute and accumulate a piece of the weight gradients of the oldest waiting microbatch.

        Args:
            last: Whether it is the last microbatch of the batch, after which the gradients of
                these weights are complete and their reduction may start.
            pieces: Into how many they are cut; the same for all pieces of a microbatch.
            pause: Makes a context in which data parallelism counts no gradient as complete.

        Returns:
            Whether it was the microbatch's last piece.
        """
        works = self._waiting[0]
        start, end = (len(works) * n // pieces for n in (self._pieces_done, self._pieces_done + 1))
        for number in range(start, end):
            work = works[number]
            # What reports by itself would report every microbatch, the last one or not: weight
            # gradients of earlier ones may still be waiting when the last backward is done.
            with pause() if work.reports else contextlib.nullcontext():
                work.run()
            works[number] = _DONE  # drops the operands
            if last:
                for weight in work.weights:
                    self._complete(weight)
        self._pieces_done = (self._pieces_done + 1) % pieces
        if self._pieces_done:
            return False
        self._waiting.popleft()
        return True

    def _complete(self, weight: torch.Tensor) -> None:
        """Tell data parallelism, where it overlaps its reduction, that a gradient is complete."""
        model = self._model
        overlaps = getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False)
        if overlaps and weight in model.param_to_bucket_group:
            model.param_to_bucket_group[weight].register_grad_ready(weight, model.force_all_reduce)


def split_linear(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's linear function, splitting its backward while `WeightGradients` collect."""

    def linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[torch.Tensor] | None = None,
        wgrad_deferral_limit: int | None = 0,
        tp_group: dist.ProcessGroup | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        splits = (
            _current is not None
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled()
            and input.requires_grad  # else the node would have no gradient to run for
            and isinstance(weight, torch.nn.Parameter)
            and weight.requires_grad
            and hasattr(weight, "main_grad")
            and grad_output_buffer is None
            and rest.get("gtp_remat_size", 1) == 1
        )
        if not splits:
            return original(
                input,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                grad_output_buffer,
                wgrad_deferral_limit,
                tp_group,
                **rest,
            )
        settings = _Settings(gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
        output: torch.Tensor = _SplitLinear.apply(
            input, bias, _Hidden(weight), settings, tp_group or _tensor_parallel_group()
        )
        return output

    return linear


def _tensor_parallel_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Keeps a weight out of autograd's sight."""

    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Settings:
    fused: bool
    all_reduce: bool
    sequence_parallel: bool


class _SplitLinear(torch.autograd.Function):
    """``input @ weight.T + bias`` whose backward leaves the weight's gradient for later."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        hidden: _Hidden,
        settings: _Settings,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.settings, ctx.group = hidden.weight, settings, group
        ctx.has_bias = bias is not None
        if settings.sequence_parallel:
            input = _gather(input, group)
        output = torch.matmul(input, hidden.weight.t())
        return output + bias if bias is not None else output

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> Any:
        (input,) = ctx.saved_tensors
        settings: _Settings = ctx.settings
        gradient = output_gradient.matmul(ctx.weight)
        if settings.all_reduce:
            dist.all_reduce(gradient, group=ctx.group)
        elif settings.sequence_parallel:
            whole, gradient = gradient, torch.empty_like(input)
            dist.reduce_scatter_tensor(gradient, whole, group=ctx.group)
        bias_gradient = None
        if ctx.has_bias:
            bias_gradient = output_gradient.reshape(-1, output_gradient.shape[-1]).sum(dim=0)
        gather = ctx.group if settings.sequence_parallel else None
        deferred = _Deferred(ctx.weight, input, output_gradient, settings.fused, gather)
        collecting = current()
        if collecting is None:
            raise RuntimeError("a split backward ran outside a pipeline task")
        collecting.put(functools.partial(_accumulate, deferred), (ctx.weight,))
        return gradient, bias_gradient, None, None, None


def _gather(input: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = input.new_empty((input.shape[0] * group.size(), *input.shape[1:]))
    dist.all_gather_into_tensor(whole, input.contiguous(), group=group)
    return whole


@torch.no_grad()
def _accumulate(deferred: _Deferred) -> None:
    """Add one weight gradient to the weight's main gradient, as Megatron does."""
    weight: Any = deferred.weight
    input = _gather(deferred.input, deferred.gather) if deferred.gather else deferred.input
    gradient, input = prepare_input_tensors_for_wgrad_compute(deferred.output_gradient, input)
    if not deferred.fused:
        weight.main_grad.add_(gradient.t().matmul(input))
        return
    import fused_weight_gradient_mlp_cuda as kernels

    if weight.main_grad.dtype is torch.float32:
        kernels.wgrad_gemm_accum_fp32(input, gradient, weight.main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(input, gradient, weight.main_grad)
