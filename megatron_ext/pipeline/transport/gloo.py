"""Messages over gloo: headers and tensors in CPU memory.

A header and a small tensor travel as one gloo message, since gloo lets a message be shorter than
the receive that is posted for it. A larger tensor follows as a second one. Its receive is posted
together with that of the header, before anything is known of the tensor, with the size of the
link's last large tensor, so that it need not wait for an answer to its header; what exceeds that
size follows as a third message. Both ends see the same messages and so know the size.

Tensors on a GPU go through pinned host memory.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import override

import torch
import torch.distributed as dist

from megatron_ext.pipeline.task import HEADER_BYTES, Direction, Header, HeaderError
from megatron_ext.pipeline.transport.base import Layout, Message, layout_of
from megatron_ext.pipeline.transport.link_threads import LinkThreads, Receive, Send
from megatron_ext.pipeline.transport.pinned import PinnedMemory, as_bytes

# Up to this size a tensor travels in one piece with its header.
_INLINE_BYTES = 64 * 1024

_HEADER_TAGS = {Direction.FORWARD: 7001, Direction.BACKWARD: 7002}
_TENSOR_TAGS = {Direction.FORWARD: 7003, Direction.BACKWARD: 7004}


class GlooTransport(LinkThreads):
    """The links of one stage over a gloo process group of the pipeline's ranks.

    Args:
        group: A gloo group of this pipeline, used by nothing else.
        sources: Group rank to receive from, per direction.
        destinations: Group rank to send to, per direction.
        capacity: Receive buffers per direction.
        device: Where received tensors are put.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sources: dict[Direction, int],
        destinations: dict[Direction, int],
        capacity: int,
        device: torch.device,
    ) -> None:
        super().__init__(sources=sources, destinations=destinations, capacity=capacity)
        self._group = group
        self._device = device
        self._start()

    @override
    def _receiver(self, direction: Direction, peer: int) -> Receive:
        return _Receiver(self._group, direction, peer, self._device).receive

    @override
    def _sender(self, direction: Direction, peer: int) -> Send:
        return _Sender(self._group, direction, peer, self._device).send


class _Receiver:
    """The receiving end of a link."""

    def __init__(
        self, group: dist.ProcessGroup, direction: Direction, peer: int, device: torch.device
    ) -> None:
        self._group = group
        self._direction = direction
        self._peer = peer
        self._pinned = PinnedMemory(device) if device.type == "cuda" else None
        self._slot = _Slot()
        self._ahead = 0
        """Size of the link's last large tensor, and of the receive that is posted ahead."""
        self._posted: tuple[torch.Tensor, dist.Work] | None = None

    def receive(self) -> Message:
        """Wait for the next message."""
        work = self._group.recv([self._slot.memory], self._peer, _HEADER_TAGS[self._direction])
        if self._ahead and not self._posted:
            memory = torch.empty(self._ahead, dtype=torch.uint8)
            self._posted = memory, self._receive_into(memory)
        work.wait()
        header = Header.unpack(self._slot.bytes)
        if header.direction is not self._direction:
            raise HeaderError(f"a {header.direction.payload} on the link of {self._direction.name}")
        layout = layout_of(header)
        if layout is None:
            return Message(header, None)
        if layout.nbytes <= _INLINE_BYTES:
            tensor = self._slot.payload(layout).clone()
        else:
            tensor = self._receive_large(layout.nbytes).view(layout.dtype).view(layout.shape)
        if self._pinned is not None:
            tensor = self._pinned.to_device(tensor)
        return Message(header, tensor)

    def _receive_large(self, nbytes: int) -> torch.Tensor:
        """The bytes of a large tensor, in memory of their own."""
        memory, first = self._posted or (torch.empty(0, dtype=torch.uint8), None)
        self._posted, self._ahead = None, nbytes
        size = len(memory)
        if nbytes <= size and first:
            first.wait()
            # A tensor much smaller than its memory would waste it for as long as it lives.
            return memory[:nbytes] if 4 * nbytes > 3 * size else memory[:nbytes].clone()
        whole = torch.empty(nbytes, dtype=torch.uint8)
        rest = self._receive_into(whole[size:])
        if first:
            first.wait()
            whole[:size].copy_(memory)
        rest.wait()
        return whole

    def _receive_into(self, memory: torch.Tensor) -> dist.Work:
        return self._group.recv([memory], self._peer, _TENSOR_TAGS[self._direction])


class _Sender:
    """The sending end of a link."""

    def __init__(
        self, group: dist.ProcessGroup, direction: Direction, peer: int, device: torch.device
    ) -> None:
        self._group = group
        self._direction = direction
        self._peer = peer
        self._pinned = PinnedMemory(device) if device.type == "cuda" else None
        self._slot = _Slot()
        self._ahead = 0
        """Size of the link's last large tensor: the neighbour has posted a receive for it."""

    def send(self, message: Message, produced: torch.cuda.Event | None) -> None:
        """Send a message and wait until it has been received."""
        header, tensor, _ = message
        if self._pinned is not None and tensor is not None:
            tensor = self._pinned.to_host(tensor, produced)
        slot = self._slot
        slot.bytes[:HEADER_BYTES] = header.pack()
        layout = layout_of(header)
        inline = layout.nbytes if layout and layout.nbytes <= _INLINE_BYTES else 0
        if inline and layout and tensor is not None:
            slot.payload(layout).copy_(tensor)
        works = [self._group.send([slot.first(inline)], self._peer, _HEADER_TAGS[self._direction])]
        if tensor is not None and layout and layout.nbytes > inline:
            data = as_bytes(tensor.contiguous())
            for piece in (data[: self._ahead], data[self._ahead :]):
                if len(piece):
                    works.append(
                        self._group.send([piece], self._peer, _TENSOR_TAGS[self._direction])
                    )
            self._ahead = layout.nbytes
        for work in works:
            work.wait()


class _Slot:
    """Memory of one link for a header and a tensor of up to `_INLINE_BYTES`."""

    def __init__(self) -> None:
        self.memory = torch.empty(HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        self.bytes = memoryview(self.memory.numpy())
        # Few shapes come up again and again, and making a view costs as much as the copy.
        self.payload = functools.lru_cache(maxsize=64)(self._payload)
        self.first = functools.lru_cache(maxsize=64)(self._first)

    def _payload(self, layout: Layout) -> torch.Tensor:
        """The tensor behind the header, as a view."""
        data = self.memory[HEADER_BYTES : HEADER_BYTES + layout.nbytes]
        return data.view(layout.dtype).view(layout.shape)

    def _first(self, nbytes: int) -> torch.Tensor:
        """The header and that many bytes behind it, as a view."""
        return self.memory[: HEADER_BYTES + nbytes]


def make_group(ranks: list[int], timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of one pipeline's ranks; only these ranks need to call this."""
    group = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_s),
        backend="gloo",
        use_local_synchronization=True,
        group_desc="RRFP_PIPELINE",
    )
    assert isinstance(group, dist.ProcessGroup)
    return group
