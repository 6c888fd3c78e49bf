"""The compute thread's side of a transport: counts, permits and the queue of what has arrived."""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Iterable
from queue import Empty
from typing import override

import torch

from megatron_ext.pipeline.task import Direction
from megatron_ext.pipeline.transport.arrivals import Arrivals
from megatron_ext.pipeline.transport.base import Message, Transport, TransportError


class Mailbox(Transport, abc.ABC):
    """All of `Transport` but the links themselves.

    A subclass moves messages in threads of its own. It is told of every message to send
    (`_submit`) and of every message that may come (`_grant`), and from its threads it calls
    `_deliver`, `_taken_by_neighbour` and `_break`. The two sides hand over through `Arrivals`.

    Args:
        sources: Directions in which messages are received.
        destinations: Directions in which messages are sent.
        capacity: Receive buffers per direction.
    """

    def __init__(
        self, sources: Iterable[Direction], destinations: Iterable[Direction], capacity: int
    ) -> None:
        self._arrived: Arrivals[Message | TransportError | None] = Arrivals()
        """Messages, broken links, and None where a message was sent and `report_sent` is on."""
        self._untaken: deque[Message] = deque()
        # Per direction what the neighbour may still send, and how much of it has a buffer.
        self._expected = dict.fromkeys(sources, 0)
        self._room = dict.fromkeys(self._expected, capacity)
        self._queued = dict.fromkeys(destinations, 0)
        self._sent = dict.fromkeys(self._queued, 0)
        self._reports_sent = False

    # What a subclass adds.

    @abc.abstractmethod
    def _grant(self, direction: Direction, count: int) -> None:
        """Let `count` more messages come: each is expected and has a buffer. Must not wait."""

    @abc.abstractmethod
    def _submit(self, message: Message, produced: torch.cuda.Event | None) -> None:
        """Queue a message whose tensor is complete once `produced` is. Must not wait."""

    # What a subclass calls from its threads; for each direction from one thread only.

    def _deliver(self, message: Message) -> None:
        self._arrived.put(message._replace(arrived=time.perf_counter()))

    def _taken_by_neighbour(self, direction: Direction) -> None:
        self._sent[direction] += 1
        if self._reports_sent:
            self._arrived.put(None)

    def _break(self, error: Exception, peer: int, direction: Direction, sending: bool) -> None:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        self._arrived.put(TransportError(reason, peer, direction, sending))

    # What the compute thread calls.

    @override
    def expect(self, direction: Direction, count: int) -> None:
        self._expected[direction] += count
        self._permit(direction)

    @override
    def consumed(self, direction: Direction) -> None:
        self._room[direction] += 1
        self._permit(direction)

    def _permit(self, direction: Direction) -> None:
        count = min(self._expected[direction], self._room[direction])
        if count:
            self._expected[direction] -= count
            self._room[direction] -= count
            self._grant(direction, count)

    @override
    def send(self, message: Message) -> None:
        tensor, produced = message.tensor, None
        if tensor is not None and tensor.is_cuda:
            produced = torch.cuda.Event()  # type: ignore[no-untyped-call]
            produced.record()
        self._queued[message.header.direction] += 1
        self._submit(message, produced)

    @override
    def sent(self, direction: Direction) -> int:
        return self._sent.get(direction, 0)

    @override
    def report_sent(self, on: bool) -> None:
        self._reports_sent = on

    @override
    def take(self) -> Message | None:
        # A link may break after its last message came: the message is still good.
        while not self._untaken and not self._arrived.empty():
            self._accept(self._arrived.get(0))
        if not self._untaken:
            return None
        message = self._untaken.popleft()
        if message.tensor is not None and message.tensor.is_cuda:
            # A thread of the transport allocated it on a stream of its own.
            message.tensor.record_stream(torch.cuda.current_stream())
        return message

    @override
    def wait(self, seconds: float) -> bool:
        try:
            self._accept(self._arrived.get(seconds))
        except Empty:
            return False
        return True

    @override
    def wake(self) -> None:
        self._arrived.put(None)

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

    def _accept(self, item: Message | TransportError | None) -> None:
        if isinstance(item, TransportError):
            self._arrived.put(item)  # a broken link stays broken
            raise item
        if item is not None:
            self._untaken.append(item)
