"""Messages over gloo: a thread per link, headers and tensors in CPU memory.

A receiving thread posts a receive only for messages that are expected and have a free buffer, so
memory is bounded and no receive is left behind at the end of a batch. A sending thread may wait
for the neighbour; the compute thread never does. Tensors on a GPU go through host memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ext.pipeline.task import Direction, Header, HeaderError
from megatron_ext.pipeline.transport.base import Message, TransportError, allocate

_TAGS = {Direction.FORWARD: 7001, Direction.BACKWARD: 7002}


class GlooTransport:
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
        self._capacity = capacity
        lock = threading.Lock()  # guards everything below; one condition per thread that waits
        self._news = threading.Condition(lock)
        self._receivable = {direction: threading.Condition(lock) for direction in sources}
        self._sendable = {direction: threading.Condition(lock) for direction in destinations}
        self._has_news = False
        self._arrived: deque[Message] = deque()
        self._expected = dict.fromkeys(sources, 0)
        self._buffered = dict.fromkeys(sources, 0)
        self._outgoing: dict[Direction, deque[tuple[Message, torch.cuda.Event | None]]]
        self._outgoing = {direction: deque() for direction in destinations}
        self._sent = dict.fromkeys(destinations, 0)
        self._failure: TransportError | None = None
        self._closed = False
        for direction, peer in sources.items():
            self._start(self._receive_all, direction, peer, sending=False)
        for direction, peer in destinations.items():
            self._start(self._send_all, direction, peer, sending=True)

    # The compute thread's side.

    def expect(self, direction: Direction, count: int) -> None:
        with self._receivable[direction]:
            self._expected[direction] += count
            self._receivable[direction].notify()

    def send(self, message: Message) -> None:
        tensor, event = message.tensor, None
        if tensor is not None and tensor.is_cuda:
            event = torch.cuda.Event()
            event.record()
        direction = message.header.direction
        with self._sendable[direction]:
            self._outgoing[direction].append((message, event))
            self._sendable[direction].notify()

    def sent(self, direction: Direction) -> int:
        return self._sent[direction]

    def take(self) -> Message | None:
        if self._failure:
            raise self._failure
        return self._arrived.popleft() if self._arrived else None

    def consumed(self, direction: Direction) -> None:
        with self._receivable[direction]:
            self._buffered[direction] -= 1
            self._receivable[direction].notify()

    def wait(self, seconds: float) -> bool:
        with self._news:
            happened = self._news.wait_for(lambda: self._has_news or self._failure, seconds)
            self._has_news = False
        if self._failure:
            raise self._failure
        return bool(happened)

    def flush(self, seconds: float) -> bool:
        def empty() -> bool:
            return bool(self._failure) or not any(self._outgoing.values())

        with self._news:
            done = self._news.wait_for(empty, seconds)
        if self._failure:
            raise self._failure
        return done

    def close(self) -> None:
        with self._news:
            self._closed = True
            for condition in (*self._receivable.values(), *self._sendable.values()):
                condition.notify()

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
                reason = str(error).strip().splitlines()[0] if str(error) else repr(error)
                with self._news:
                    if not self._failure and not self._closed:
                        self._failure = TransportError(reason, peer, direction, sending)
                    self._news.notify()

        name = f"rrfp-{'send' if sending else 'receive'}-{direction.name.lower()}"
        threading.Thread(target=run, name=name, daemon=True).start()

    def _receive_all(self, direction: Direction, peer: int) -> None:
        def may_receive() -> bool:
            room = self._buffered[direction] < self._capacity
            return self._closed or (self._expected[direction] > 0 and room)

        tag = _TAGS[direction]
        packed = torch.empty(Header.SIZE, dtype=torch.uint8)
        while True:
            with self._receivable[direction]:
                self._receivable[direction].wait_for(may_receive)
                if self._closed:
                    return
                self._expected[direction] -= 1
                self._buffered[direction] += 1
            self._group.recv([packed], peer, tag).wait()
            header = Header.unpack(packed.numpy().tobytes())
            if header.direction is not direction:
                raise HeaderError(f"a {header.direction.payload} on the link of {direction.name}")
            tensor = allocate(header)
            if tensor is not None and tensor.numel():
                self._group.recv([_as_bytes(tensor)], peer, tag).wait()
            if tensor is not None and self._device.type != "cpu":
                tensor = tensor.to(self._device)
            with self._news:
                self._arrived.append(Message(header, tensor))
                self._has_news = True
                self._news.notify()

    def _send_all(self, direction: Direction, peer: int) -> None:
        queue = self._outgoing[direction]
        tag = _TAGS[direction]
        while True:
            with self._sendable[direction]:
                self._sendable[direction].wait_for(lambda: queue or self._closed)
                if self._closed:
                    return
                (header, tensor), event = queue[0]
            if event is not None:
                event.synchronize()
            packed = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
            works = [self._group.send([packed], peer, tag)]
            if tensor is not None and tensor.numel():
                payload = _as_bytes(tensor.detach().to("cpu").contiguous())
                works.append(self._group.send([payload], peer, tag))
            for work in works:
                work.wait()
            with self._news:
                queue.popleft()
                self._sent[direction] += 1
                self._has_news = True
                self._news.notify()


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
