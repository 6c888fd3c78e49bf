"""Messages over NIXL: one-sided writes into slots of the neighbour, on CPU and GPU memory.

One thread per stage serves all links. A message needs no matching receive: its data is written
into slots that the neighbour lent, and a notification with the header follows the data, so that
messages may come in any order and no kernel waits on the GPU. UCX picks the way: shared memory or
NVLink inside a node, RDMA between nodes. The thread sleeps until it is rung for.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple, override

import torch
import torch.distributed as dist

from megatron_ext.pipeline.task import Direction, HeaderError
from megatron_ext.pipeline.transport.base import Message
from megatron_ext.pipeline.transport.bell import Address, Bells, Doorway
from megatron_ext.pipeline.transport.mailbox import Mailbox
from megatron_ext.pipeline.transport.nixl_agent import Agent
from megatron_ext.pipeline.transport.notice import Return, parse
from megatron_ext.pipeline.transport.slot_links import Copier, Inlet, Outlet, Wire

SLOT_BYTES = 8 << 20
"""Size of a slot: larger tensors travel in several pieces."""
SLOTS = 4
"""Slots of a link at either end: some are written while others are emptied."""

# While something is under way: rounds in which only the processor is yielded, then sleeps.
_YIELDS = 20
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 200e-6

_GREETING = b"hello"


class _Introduction(NamedTuple):
    """What a stage tells its neighbours at the start."""

    metadata: bytes
    address: Address
    slots: dict[Direction, int]
    """Memory address of the first slot that may be written, per direction."""
    device: int
    slot_bytes: int
    slot_count: int


class NixlTransport(Mailbox):
    """The links of one stage over NIXL.

    All stages of the pipeline must make theirs at about the same time.

    Args:
        group: A gloo group of the pipeline's ranks; used only to set up.
        sources: Group rank to receive from, per direction.
        destinations: Group rank to send to, per direction.
        capacity: Most messages per direction that have come and are not consumed.
        device: Where slots and received tensors are.
        timeout_s: Seconds after which a neighbour that is not heard of is lost.
        slot_bytes: Size of a slot; the same on all stages.
        slot_count: Slots of a link, from 1 to 64; the same on all stages.

    Raises:
        UsageError: NIXL is not there or does not work.
        OSError: A neighbour cannot be reached by TCP.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sources: dict[Direction, int],
        destinations: dict[Direction, int],
        capacity: int,
        device: torch.device,
        timeout_s: float,
        slot_bytes: int = SLOT_BYTES,
        slot_count: int = SLOTS,
    ) -> None:
        super().__init__(sources, destinations, capacity)
        self._device = device
        self._commands: SimpleQueue[_Send | _Grant] = SimpleQueue()
        self._asleep = False
        self._closing = False
        self._process = os.getpid()

        # Slots are views of one piece of memory: the fewer registrations, the better.
        links = len(sources) + len(destinations)
        self._memory = torch.empty(
            (links, slot_count, slot_bytes), dtype=torch.uint8, device=device
        )
        receiving = dict(zip(sources, self._memory, strict=False))
        sending = dict(zip(destinations, self._memory[len(sources) :], strict=True))
        rank = group.rank()
        self._agent = Agent(f"rrfp-{rank}-{secrets.token_hex(8)}", [self._memory])
        doorway = Doorway()
        mine = _Introduction(
            self._agent.metadata,
            doorway.address,
            {direction: slots.data_ptr() for direction, slots in receiving.items()},
            max(0, self._memory.get_device()),
            slot_bytes,
            slot_count,
        )
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        peers = {*sources.values(), *destinations.values()}
        for peer in peers:
            assert everyone[peer][-2:] == mine[-2:], "slots must be the same on all stages"
        self._bells = doorway.open_bells(
            rank, peers, [introduction.address for introduction in everyone], timeout_s
        )
        names = {peer: self._agent.connect(everyone[peer].metadata) for peer in peers}
        self._ranks = {name: peer for peer, name in names.items()}

        copier = Copier(device)
        self._inlets: dict[Direction, Inlet] = {}
        self._outlets: dict[Direction, Outlet] = {}
        for direction, peer in sources.items():
            wire = _Wire(self._agent, self._bells, peer, names[peer])
            self._inlets[direction] = Inlet(
                direction, peer, list(receiving[direction]), capacity, wire, copier, self._deliver
            )
        for direction, peer in destinations.items():
            slots = list(sending[direction])
            wire = _Wire(self._agent, self._bells, peer, names[peer])
            wire.aim(slots, everyone[peer].slots[direction], everyone[peer].device)
            taken = functools.partial(self._taken_by_neighbour, direction)
            self._outlets[direction] = Outlet(direction, peer, slots, wire, copier, taken)
        self._links: list[Inlet | Outlet] = [*self._inlets.values(), *self._outlets.values()]
        self._early: list[tuple[int, bytes]] = []
        """Notices of neighbours that were ready before us."""
        self._greet(timeout_s)
        self._thread = threading.Thread(target=self._work, name="rrfp-nixl", daemon=True)
        self._thread.start()
        # The agent must not be torn down by a dying interpreter while the thread uses it.
        atexit.register(self.close)

    def _greet(self, timeout_s: float) -> None:
        """Wait until notifications go through to every neighbour and from it.

        UCX connects when something is first sent, which takes both sides' attention.
        """
        deadline = time.monotonic() + timeout_s
        for name in self._ranks:
            self._agent.notify(name, _GREETING)
        greeted: set[int] = set()
        # A neighbour rings when it has our greeting.
        while missing := {
            peer for peer, rings in self._bells.ringing.items() if peer not in greeted or not rings
        }:
            for name, notices in self._agent.notices().items():
                peer = self._ranks[name]
                for notice in notices:
                    if notice == _GREETING:
                        greeted.add(peer)
                        self._bells.ring(peer)
                    else:
                        self._early.append((peer, notice))
            for peer in missing:
                if self._bells.gone(peer):
                    raise OSError(f"lost stage {peer} at the start: {self._bells.lost[peer]}")
            if time.monotonic() > deadline:
                raise OSError(f"UCX does not connect to stages {sorted(missing)} in time")
            self._bells.wait(0.001)
        for peer in self._bells.ringing:
            self._bells.ringing[peer] -= 1

    # The compute thread's side.

    @override
    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has neither the thread nor the connections
        self._closing = True
        self._bells.wake()
        self._thread.join(timeout=5.0)
        atexit.unregister(self.close)

    @override
    def _grant(self, direction: Direction, count: int) -> None:
        self._command(_Grant(direction, count))

    @override
    def _submit(self, message: Message, produced: torch.cuda.Event | None) -> None:
        self._command(_Send(message, produced))

    def _command(self, command: _Send | _Grant) -> None:
        self._commands.put(command)
        if self._asleep:
            self._bells.wake()

    # The thread's side.

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        fruitless = 0
        try:
            for peer, notice in self._early:
                self._read(peer, notice)
            while not self._closing:
                if self._turn():
                    fruitless = 0
                else:
                    self._pause(fruitless)
                    fruitless += 1
        except _BrokenLinkError as error:
            link = error.link
            self._break(error.reason, link.peer, link.direction, link.sending)
        except Exception as error:
            for link in self._links:
                self._break(error, link.peer, link.direction, link.sending)
        finally:
            self._bells.close()  # which tells the neighbours

    def _turn(self) -> bool:
        """Do all that can be done now; whether anything was."""
        moved = False
        while not self._commands.empty():
            moved = True
            match self._commands.get():
                case _Grant(direction, count):
                    self._inlets[direction].grant(count)
                case _Send(message, produced):
                    self._outlets[message.header.direction].queue(message, produced)
        for name, notices in self._agent.notices().items():
            moved = True
            for notice in notices:
                self._read(self._ranks[name], notice)
        for link in self._links:
            with _blaming(link):
                self._check(link)
                moved = link.advance() or moved
        return moved

    def _read(self, peer: int, data: bytes) -> None:
        """Act on a notification of a neighbour."""
        self._bells.ringing[peer] -= 1
        with _blaming(next(link for link in self._links if link.peer == peer)):
            notice = parse(data)
            if isinstance(notice, Return):
                outlet = self._outlets.get(notice.direction)
                if outlet is not None and outlet.peer == peer:
                    with _blaming(outlet):
                        return outlet.read(notice)
            else:
                inlet = self._inlets.get(notice.direction)
                if inlet is not None and inlet.peer == peer:
                    with _blaming(inlet):
                        return inlet.read(notice)
            raise HeaderError(f"a notice of {notice.direction.name} from the wrong stage")

    def _check(self, link: Inlet | Outlet) -> None:
        """Raise an error if the neighbour is lost and the link still needs it.

        A neighbour that ends well has sent all it had to; what it rang for may still be on the
        way.
        """
        if link.wanting and self._bells.gone(link.peer):
            raise ConnectionError(self._bells.lost[link.peer])

    def _pause(self, fruitless: int) -> None:
        """Sleep, the longer the more turns were fruitless, and until something happens."""
        if self._bells.watchful or any(link.busy for link in self._links):
            self._bells.wait(0)
            if fruitless < _YIELDS:
                os.sched_yield()
            else:
                doublings = min(fruitless - _YIELDS, 10)
                time.sleep(min(_SHORTEST_SLEEP_S * 2**doublings, _LONGEST_SLEEP_S))
            return
        self._asleep = True
        if self._commands.empty() and not self._closing:
            # UCX may have put off a notification; the next turns see to it. A lost neighbour is
            # given a moment, after which the links to it are to be looked at again.
            longest = 2 if self._bells.lost else 6
            self._bells.wait(0.001 * 10 ** min(fruitless, longest))
        self._asleep = False


class _BrokenLinkError(Exception):
    """What went wrong on which link."""

    def __init__(self, link: Inlet | Outlet, reason: Exception) -> None:
        super().__init__(str(reason))
        self.link = link
        self.reason = reason


@contextlib.contextmanager
def _blaming(link: Inlet | Outlet) -> Iterator[None]:
    try:
        yield
    except _BrokenLinkError:
        raise
    except Exception as error:
        raise _BrokenLinkError(link, error) from error


class _Send(NamedTuple):
    message: Message
    produced: torch.cuda.Event | None


class _Grant(NamedTuple):
    direction: Direction
    messages: int


class _Wire(Wire):
    """The way to one neighbour: writes and notifications, with a ring for each."""

    def __init__(self, agent: Agent, bells: Bells, peer: int, name: str) -> None:
        self._agent = agent
        self._bells = bells
        self._peer = peer
        self._name = name
        self._prepared: dict[int, tuple[int, Any]] = {}
        """Size and handle of the last write from every slot: often the next is the same."""

    def aim(self, slots: list[torch.Tensor], address: int, device: int) -> None:
        """Say where the slots of the neighbour begin."""
        self._slots = slots
        self._address = address
        self._remote_device = device

    @override
    def write(self, slot: int, nbytes: int, notice: bytes) -> bool:
        before, handle = self._prepared.get(slot, (0, None))
        if nbytes != before:
            if handle is not None:
                self._agent.release(handle)
            local = self._slots[slot]
            handle = self._agent.prepare(
                self._name, local[:nbytes], self._address + slot * len(local), self._remote_device
            )
            self._prepared[slot] = nbytes, handle
        done = self._agent.start(handle, notice)
        if done:
            self._bells.ring(self._peer)
        else:
            self._bells.started(self._peer)
        return done

    @override
    def written(self, slot: int) -> bool:
        done = self._agent.done(self._prepared[slot][1])
        if done:
            self._bells.ended(self._peer)
        return done

    @override
    def notify(self, notice: bytes) -> None:
        if self._peer in self._bells.lost:
            return  # whoever still needs the neighbour says so
        self._agent.notify(self._name, notice)
        self._bells.ring(self._peer)
