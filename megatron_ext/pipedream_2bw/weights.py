"""The two weight versions of a stage."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ext.pipedream_2bw.leaf_optimizers import leaf_optimizers
from megatron_ext.pipedream_2bw.slots import SecondCopy, Slots, bucket_groups_of, buffers_of


class WeightVersions:
    """Versions n (the newest) and n-1 of all trainable parameters of a stage.

    Batch k, counted from 0, runs forward and backward on version k-1 on every stage and its
    gradient makes version k+1 from version k (PipeDream-2BW, arXiv 2006.09503, section 3.1). The
    new version is written into the memory of the one that no batch needs any more, so nothing that
    a graph in flight has saved is ever written to.

    Args:
        models: The stage's model chunks, wrapped for data parallelism.
        optimizer: Megatron's optimizer of these chunks.
    """

    def __init__(self, models: list[Any], optimizer: Any) -> None:
        self.newest = 0
        self._slots = Slots()
        self._newest_slot = 0
        self._memory = SecondCopy()
        for model in models:
            self._add_buffers(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    data = parameter.data
                    self._slots.add(parameter, "data", data, self._memory.view(data))
        for shard in _aliasing_shards(optimizer):
            self._slots.add(shard, "data", shard.data, self._memory.view(shard.data))

    def _add_buffers(self, model: Any) -> None:
        """Where the distributed optimizer keeps parameters in a buffer, with its slices."""
        memory, slots = self._memory, self._slots
        for buffer in buffers_of(model):
            if buffer.param_data is None:
                continue
            slots.add(buffer, "param_data", buffer.param_data, memory.buffer(buffer.param_data))
            for bucket in buffer.buckets:
                data = bucket.param_data
                slots.add(bucket, "param_data", data, memory.view(data))
        for group in bucket_groups_of(model):
            # Views that Megatron makes when it first needs them, for each copy its own.
            name = "cached_param_buffer_shard_list"
            if (cached := getattr(group, name, None)) is not None:
                slots.add(group, name, cached, [None] * len(cached))

    def select(self, version: int) -> None:
        """Point the stage's parameters to a version.

        Raises:
            ValueError: That version is not kept any more, or not made yet.
        """
        if version == self.newest:
            self.select_newest()
        elif version == self.newest - 1:
            self.select_older()
        else:
            raise ValueError(
                f"weight version {version} is neither {self.newest} nor the one before"
            )

    def select_newest(self) -> None:
        """Point the stage's parameters to the newest version."""
        self._slots.select(self._newest_slot)

    def select_older(self) -> None:
        """Point them to the version before, or to where the next one is being made."""
        self._slots.select(1 - self._newest_slot)

    @torch.no_grad()
    def prepare_next(self) -> None:
        """Copy the newest version over the older one and point there, for an optimizer to step."""
        source, target = self._newest_slot, 1 - self._newest_slot
        for copies in self._memory.pairs():
            copies[target].copy_(copies[source])
        self.select_older()

    def commit(self) -> None:
        """What `prepare_next` began is the newest version now."""
        self._newest_slot = 1 - self._newest_slot
        self.newest += 1

    def step_in_place(self) -> None:
        """The newest version was changed in place and is the next one; there is no older one."""
        self.newest += 1


def _aliasing_shards(optimizer: Any) -> list[torch.Tensor]:
    """Shards of the distributed optimizer that are views of fp32 parameters, not copies."""
    return [
        shard
        for one in leaf_optimizers(optimizer)
        for group in getattr(one, "shard_fp32_groups", [])
        for shard in group
    ]
