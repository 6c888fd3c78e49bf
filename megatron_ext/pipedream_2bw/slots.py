"""Two copies of the buffers that Megatron's modules and optimizers point to, and which is seen.

Nothing of Megatron is told that there are two: to change over, the pointers are set. A parameter's
`data`, its `main_grad`, the buffers and buckets of Megatron's data parallelism and the shards of
its distributed optimizer all take part, so that whatever runs next works on the chosen copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class Slots:
    """Pointers that are set together, to one of two copies."""

    def __init__(self) -> None:
        self._pointers: list[tuple[Any, str, tuple[Any, Any]]] = []
        self.current = 0

    def add(self, owner: Any, name: str, first: Any, second: Any) -> None:
        """Let ``owner.name``, which is `first` now, take part."""
        self._pointers.append((owner, name, (first, second)))

    def select(self, slot: int) -> None:
        """Point everything to one copy; costs a pointer per tensor, and nothing if it is so."""
        if slot == self.current:
            return
        self.current = slot
        for owner, name, copies in self._pointers:
            setattr(owner, name, copies[slot])


class SecondCopy:
    """Memory for a second copy of tensors, some of which are views of a common buffer."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._loose: list[tuple[torch.Tensor, torch.Tensor]] = []

    def buffer(self, flat: torch.Tensor) -> torch.Tensor:
        """The copy of a flat buffer; views of it are copied as views of the copy."""
        copy = flat.clone()
        self._buffers.append((flat, copy))
        return copy

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of the copied buffer, or a copy of its own if it belongs to none."""
        for flat, copy in self._buffers:
            offset = (tensor.data_ptr() - flat.data_ptr()) // flat.element_size()
            if tensor.dtype == flat.dtype and 0 <= offset < flat.numel():
                return copy.as_strided(
                    tensor.size(), tensor.stride(), copy.storage_offset() + offset
                )
        copy = tensor.clone()
        self._loose.append((tensor, copy))
        return copy

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All memory, each piece once, as (first, second) copy."""
        yield from self._buffers
        yield from self._loose


def buffers_of(model: Any) -> list[Any]:
    """The gradient (and parameter) buffers of a chunk that Megatron wraps for data parallelism."""
    return list(model.buffers) + list(model.expert_parallel_buffers)


def bucket_groups_of(model: Any) -> list[Any]:
    """Its groups of buckets."""
    return list(model.bucket_groups) + list(model.expert_parallel_bucket_groups)
