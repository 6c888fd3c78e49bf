"""Transports with a thread per link: it may wait for the neighbour, the compute thread never does.

A receiving thread starts to receive only what is expected and has a free buffer, so memory is
bounded and no receive is left behind at the end of a batch.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import override

import torch

from megatron_ext.pipeline.task import Direction
from megatron_ext.pipeline.transport.base import Message
from megatron_ext.pipeline.transport.mailbox import Mailbox

Receive = Callable[[], Message]
Send = Callable[[Message, torch.cuda.Event | None], None]


class LinkThreads(Mailbox):
    """A `Mailbox` that leaves to its subclass how one message is received, and how one is sent.

    Args:
        sources: Group rank to receive from, per direction.
        destinations: Group rank to send to, per direction.
        capacity: Receive buffers per direction.
    """

    def __init__(
        self,
        *,
        sources: dict[Direction, int],
        destinations: dict[Direction, int],
        capacity: int,
    ) -> None:
        super().__init__(sources, destinations, capacity)
        self._permits: dict[Direction, SimpleQueue[bool]]
        self._permits = {direction: SimpleQueue() for direction in sources}
        self._outgoing: dict[Direction, SimpleQueue[tuple[Message, torch.cuda.Event | None] | None]]
        self._outgoing = {direction: SimpleQueue() for direction in destinations}
        self._peers = {False: sources, True: destinations}
        self._threads: list[threading.Thread] = []

    @abc.abstractmethod
    def _receiver(self, direction: Direction, peer: int) -> Receive:
        """A function that waits for the next message of a link; called in the link's thread."""

    @abc.abstractmethod
    def _sender(self, direction: Direction, peer: int) -> Send:
        """A function that sends a message and waits until the neighbour has taken it."""

    def _start(self) -> None:
        """Start all threads; the subclass calls this when it is ready for them."""
        for sending, peers in self._peers.items():
            for direction, peer in peers.items():
                name = f"rrfp-{'send' if sending else 'receive'}-{direction.name.lower()}"
                self._threads.append(
                    threading.Thread(
                        target=self._run, args=(direction, peer, sending), name=name, daemon=True
                    )
                )
        for thread in self._threads:
            thread.start()

    @override
    def close(self) -> None:
        for permits in self._permits.values():
            permits.put(False)
        for outgoing in self._outgoing.values():
            outgoing.put(None)

    @override
    def _grant(self, direction: Direction, count: int) -> None:
        for _ in range(count):
            self._permits[direction].put(True)

    @override
    def _submit(self, message: Message, produced: torch.cuda.Event | None) -> None:
        self._outgoing[message.header.direction].put((message, produced))

    def _run(self, direction: Direction, peer: int, sending: bool) -> None:
        try:
            if sending:
                self._send_all(direction, self._sender(direction, peer))
            else:
                self._receive_all(direction, self._receiver(direction, peer))
        except Exception as error:
            self._break(error, peer, direction, sending)

    def _receive_all(self, direction: Direction, receive: Receive) -> None:
        permits = self._permits[direction]
        while permits.get():
            self._deliver(receive())

    def _send_all(self, direction: Direction, send: Send) -> None:
        outgoing = self._outgoing[direction]
        while item := outgoing.get():
            send(*item)
            item = None  # free the tensor while this thread sleeps
            self._taken_by_neighbour(direction)
