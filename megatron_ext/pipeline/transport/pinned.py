"""Tensors between a GPU and pinned host memory, for transports that go through the host."""

from __future__ import annotations

import torch


class PinnedMemory:
    """One end of a link's pinned memory, used by one thread.

    Copies run on a stream of their own: on the stream of the tasks they would wait for whatever is
    enqueued there. The memory grows to the largest tensor and is used again for each.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def to_host(self, tensor: torch.Tensor, produced: torch.cuda.Event | None) -> torch.Tensor:
        """Copy a tensor to the host once `produced` is complete.

        Returns:
            A tensor of the same type and shape in pinned memory, good until the next call.
        """
        with torch.cuda.stream(self._stream):
            if produced is not None:
                self._stream.wait_event(produced)
            data = as_bytes(tensor.contiguous())
            memory = self._room(len(data))
            memory.copy_(data, non_blocking=True)
            self._finish()
        return memory.view(tensor.dtype).view(tensor.shape)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a contiguous tensor in host memory to the GPU, and wait until it is there."""
        data = as_bytes(tensor)
        memory = self._room(len(data))
        memory.copy_(data)
        with torch.cuda.stream(self._stream):
            target = torch.empty(len(data), dtype=torch.uint8, device=self._device)
            target.copy_(memory, non_blocking=True)
            self._finish()
        return target.view(tensor.dtype).view(tensor.shape)

    def _room(self, nbytes: int) -> torch.Tensor:
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        return self._memory[:nbytes]

    def _finish(self) -> None:
        """Wait for what is on the stream, asleep."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        event.synchronize()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes: gloo then needs to know no type."""
    return tensor.view(-1).view(torch.uint8)
