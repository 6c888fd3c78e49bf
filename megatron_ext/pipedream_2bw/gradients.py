"""Two gradient buffers: while the one is reduced and applied, the next batch fills the other."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ext.pipedream_2bw.slots import SecondCopy, Slots, bucket_groups_of, buffers_of


class GradientBuffers:
    """The gradient buffers of a stage's chunks, two of each or, where one will do, one.

    Args:
        models: The stage's model chunks, wrapped for data parallelism.
        two: Whether the next batch's backwards may run before a batch's update is done.
    """

    def __init__(self, models: list[Any], *, two: bool) -> None:
        self.two = two
        self._slots = Slots()
        if not two:
            return
        for model in models:
            memory = SecondCopy()
            for buffer in buffers_of(model):
                data = buffer.grad_data
                self._slots.add(buffer, "grad_data", data, memory.buffer(data).zero_())
                for bucket in buffer.buckets:
                    data = bucket.grad_data
                    self._slots.add(bucket, "grad_data", data, memory.view(data))
            for group in bucket_groups_of(model):
                name = "cached_grad_buffer_shard_list"
                if (cached := getattr(group, name, None)) is not None:
                    self._slots.add(group, name, cached, [None] * len(cached))
            for parameter in model.parameters():
                if (gradient := getattr(parameter, "main_grad", None)) is not None:
                    self._slots.add(parameter, "main_grad", gradient, memory.view(gradient))

    def select(self, batch: int) -> None:
        """Point to the buffer of a batch."""
        self._slots.select(batch % 2 if self.two else 0)


class HiddenGradients:
    """Keeps what an update under way has in ``parameter.grad`` from the tasks between its steps.

    Where parameters are fp32, Megatron's optimizer finds its gradients there; the next batch's
    backwards would add to them.
    """

    def __init__(self, models: list[Any]) -> None:
        self._parameters = [p for m in models for p in m.parameters() if p.requires_grad]
        self._hidden: list[torch.Tensor | None] = [None] * len(self._parameters)

    def hide(self) -> None:
        """Take the gradients away."""
        self._hidden = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def show(self) -> None:
        """Put them back."""
        for parameter, gradient in zip(self._parameters, self._hidden, strict=True):
            parameter.grad = gradient
        self._hidden = [None] * len(self._parameters)
