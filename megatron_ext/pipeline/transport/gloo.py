"""Messages over gloo: a thread per link, headers and tensors in CPU memory.

A receiving thread posts a receive only for messages that are expected and have a free buffer, so
memory is bounded and no receive is left behind at the end of a batch. A sending thread may wait
for the neighbour; the compute thread never does. Tensors on a GPU go through host memory.

Threads hand over through `SimpleQueue`, which costs a fifth of what a `Condition` does.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import override

import torch
import torch.distributed as dist

from megatron_ext.pipeline.task import HEADER_BYTES, Direction, Header, HeaderError
from megatron_ext.pipeline.transport.base import (
    Layout,
    Message,
    Transport,
    TransportError,
    layout_of,
)

# Up to this size a tensor travels in one piece with its header: gloo lets a message be shorter
# than the receive that is posted for it.
_INLINE_BYTES = 64 * 1024

_TAGS = {Direction.FORWARD: 7001, Direction.BACKWARD: 7002}


class GlooTransport(Transport):
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
        self._group = group
        self._device = device
        self._arrived: SimpleQueue[Message | TransportError | None] = SimpleQueue()
        """Messages, broken links, and None where a message was sent and `report_sent` is on."""
        self._taken: deque[Message] = deque()
        # Per direction what the neighbour may still send, and how much of it has a buffer.
        self._expected = dict.fromkeys(sources, 0)
        self._room = dict.fromkeys(sources, capacity)
        self._permits: dict[Direction, SimpleQueue[bool]]
        self._permits = {direction: SimpleQueue() for direction in sources}
        self._outgoing: dict[Direction, SimpleQueue[tuple[Message, torch.cuda.Event | None] | None]]
        self._outgoing = {direction: SimpleQueue() for direction in destinations}
        self._queued = dict.fromkeys(destinations, 0)
        self._sent = dict.fromkeys(destinations, 0)
        self._reports_sent = False
        for direction, peer in sources.items():
            self._start(self._receive_all, direction, peer, sending=False)
        for direction, peer in destinations.items():
            self._start(self._send_all, direction, peer, sending=True)

    # The compute thread's side.

    @override
    def expect(self, direction: Direction, count: int) -> None:
        self._expected[direction] += count
        self._permit(direction)

    @override
    def send(self, message: Message) -> None:
        tensor, event = message.tensor, None
        if tensor is not None and tensor.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        direction = message.header.direction
        self._queued[direction] += 1
        self._outgoing[direction].put((message, event))

    @override
    def sent(self, direction: Direction) -> int:
        return self._sent.get(direction, 0)

    @override
    def report_sent(self, on: bool) -> None:
        self._reports_sent = on

    @override
    def take(self) -> Message | None:
        while not self._arrived.empty():
            self._accept(self._arrived.get())
        return self._taken.popleft() if self._taken else None

    @override
    def consumed(self, direction: Direction) -> None:
        self._room[direction] += 1
        self._permit(direction)

    @override
    def wait(self, seconds: float) -> bool:
        try:
            self._accept(self._arrived.get(timeout=seconds))
        except Empty:
            return False
        return True

    @override
    def flush(self, seconds: float) -> bool:
        before = self._reports_sent
        self._reports_sent = True  # from here on every completion wakes us
        try:
            while self._sent != self._queued:
                if not self.wait(seconds):
                    return False
        finally:
            self._reports_sent = before
        return True

    @override
    def close(self) -> None:
        for permits in self._permits.values():
            permits.put(False)
        for outgoing in self._outgoing.values():
            outgoing.put(None)

    def _permit(self, direction: Direction) -> None:
        """Let the receiving thread post as many receives as are expected and have a buffer."""
        count = min(self._expected[direction], self._room[direction])
        self._expected[direction] -= count
        self._room[direction] -= count
        for _ in range(count):
            self._permits[direction].put(True)

    def _accept(self, item: Message | TransportError | None) -> None:
        if isinstance(item, TransportError):
            self._arrived.put(item)  # a broken link stays broken
            raise item
        if item is not None:
            self._taken.append(item)

    # The links' side: each method runs in a thread of its own.

    def _start(
        self,
        work: Callable[[Direction, int], None],
        direction: Direction,
        peer: int,
        *,
        sending: bool,
    ) -> None:
        def run() -> None:
            try:
                work(direction, peer)
            except Exception as error:
                reason = (str(error).strip() or repr(error)).splitlines()[0]
                self._arrived.put(TransportError(reason, peer, direction, sending))

        name = f"rrfp-{'send' if sending else 'receive'}-{direction.name.lower()}"
        threading.Thread(target=run, name=name, daemon=True).start()

    def _receive_all(self, direction: Direction, peer: int) -> None:
        tag, permits, slot = _TAGS[direction], self._permits[direction], _Slot()
        while permits.get():
            self._group.recv([slot.memory], peer, tag).wait()
            header = Header.unpack(slot.bytes)
            if header.direction is not direction:
                raise HeaderError(f"a {header.direction.payload} on the link of {direction.name}")
            layout = layout_of(header)
            if layout is None:
                tensor = None
            elif layout.nbytes <= _INLINE_BYTES:
                tensor = slot.payload(layout).clone()
            else:
                tensor = torch.empty(layout.shape, dtype=layout.dtype)
                self._group.recv([_as_bytes(tensor)], peer, tag).wait()
            if tensor is not None and self._device.type != "cpu":
                tensor = tensor.to(self._device)
            self._arrived.put(Message(header, tensor, time.perf_counter()))

    def _send_all(self, direction: Direction, peer: int) -> None:
        tag, outgoing, slot = _TAGS[direction], self._outgoing[direction], _Slot()
        while item := outgoing.get():
            (header, tensor, _), event = item
            if event is not None:
                event.synchronize()
            slot.bytes[:HEADER_BYTES] = header.pack()
            layout = layout_of(header)
            inline = layout.nbytes if layout and layout.nbytes <= _INLINE_BYTES else 0
            if inline and layout and tensor is not None:
                slot.payload(layout).copy_(tensor)
            works = [self._group.send([slot.first(inline)], peer, tag)]
            payload: torch.Tensor | None = None
            if tensor is not None and layout and layout.nbytes > inline:
                payload = _as_bytes(tensor.to("cpu").contiguous())
                works.append(self._group.send([payload], peer, tag))
            for work in works:
                work.wait()
            self._sent[direction] += 1
            if self._reports_sent:
                self._arrived.put(None)
            item = tensor = payload = None  # free the tensor while this thread sleeps
            works.clear()


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


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes: gloo then needs to know no type."""
    return tensor.view(-1).view(torch.uint8)
