"""Links over slots, with a network and copies that are complete only when the test says so."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.pipeline.task import Direction, Header, HeaderError
from megatron_ext.pipeline.transport.base import Message, describe
from megatron_ext.pipeline.transport.notice import Piece, Return, parse
from megatron_ext.pipeline.transport.slot_links import Copier, Inlet, Outlet
from tests.pipeline.transport.links import made_up, same

FORWARD = Direction.FORWARD
SLOTS, SLOT_BYTES, CAPACITY = 3, 64, 2


class Later:
    """An event, or a write, that is complete when it is told."""

    def __init__(self) -> None:
        self.complete = False

    def query(self) -> bool:
        return self.complete


class SlowCopier(Copier):
    """Copies like a GPU does, unless `at_once`: the data is there when the event is complete."""

    at_once = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pending: deque[tuple[Later, torch.Tensor, torch.Tensor]] = deque()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Any:
        if self.at_once:
            return super().copy(target, source, after)
        event = Later()
        self.pending.append((event, target, source.clone()))
        return event

    def finish_one(self) -> bool:
        if not self.pending:
            return False
        event, target, source = self.pending.popleft()
        target.copy_(source)
        event.complete = True
        return True


class Network:
    """Writes and notifications between the two ends of a link, done when they are told."""

    def __init__(self) -> None:
        self.ours = list(torch.zeros(SLOTS, SLOT_BYTES, dtype=torch.uint8))
        self.theirs = list(torch.zeros(SLOTS, SLOT_BYTES, dtype=torch.uint8))
        self.active: dict[int, Later] = {}
        """Writes that the sender has not seen complete."""
        self.lent: set[int] = set()
        """Slots that the receiver may still look at."""
        self.under_way: list[tuple[int, int, bytes]] = []
        self.notices: list[bytes] = []
        """For the receiver."""
        self.returns: list[bytes] = []
        """For the sender."""

    def write(self, slot: int, nbytes: int, notice: bytes) -> bool:
        assert slot not in self.active, "a slot is written while it is still being written"
        assert slot not in self.lent, "a slot is written before it was returned"
        self.active[slot] = Later()
        self.under_way.append((slot, nbytes, notice))
        return False

    def written(self, slot: int) -> bool:
        if not self.active[slot].complete:
            return False
        del self.active[slot]
        return True

    def notify(self, notice: bytes) -> None:
        (self.returns if isinstance(parse(notice), Return) else self.notices).append(notice)

    def finish_write(self, index: int) -> None:
        slot, nbytes, notice = self.under_way.pop(index)
        self.theirs[slot][:nbytes] = self.ours[slot][:nbytes]
        self.ours[slot].fill_(255)  # nobody may look at it any more
        self.lent.add(slot)
        self.notices.append(notice)

    def unseen(self) -> list[Later]:
        """Writes that have been done and that the sender cannot yet know of."""
        busy = {slot for slot, *_ in self.under_way}
        writes = [write for slot, write in self.active.items() if slot not in busy]
        return [write for write in writes if not write.complete]


class Pair:
    """A link with both its ends in this process."""

    def __init__(self) -> None:
        self.network = Network()
        self.taken = 0
        self.delivered: list[Message] = []
        self.sending, self.receiving = SlowCopier(), SlowCopier()
        self.outlet = Outlet(FORWARD, 1, self.network.ours, self.network, self.sending, self._taken)
        self.inlet = Inlet(
            FORWARD,
            0,
            self.network.theirs,
            CAPACITY,
            self.network,
            self.receiving,
            self.delivered.append,
        )

    def _taken(self) -> None:
        self.taken += 1

    def send(self, microbatch: int, tensor: torch.Tensor | None) -> None:
        header = Header(0, FORWARD, microbatch, 0, *describe(tensor))
        self.outlet.queue(Message(header, tensor), None)

    def read_returns(self) -> None:
        while self.network.returns:
            notice = parse(self.network.returns.pop(0))
            assert isinstance(notice, Return)
            self.network.lent -= {slot for slot in range(SLOTS) if notice.slots >> slot & 1}
            self.outlet.read(notice)

    def read_notice(self, index: int) -> None:
        notice = parse(self.network.notices.pop(index))
        assert isinstance(notice, Piece)
        self.inlet.read(notice)


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.none() | st.integers(0, 5 * SLOT_BYTES), max_size=8),
    seed=st.integers(0, 1 << 32),
    at_once=st.booleans(),
)
def test_messages_arrive_whole_in_any_interleaving(
    sizes: list[int | None], seed: int, at_once: bool
) -> None:
    chance = random.Random(seed)
    pair = Pair()
    pair.sending.at_once = pair.receiving.at_once = at_once
    tensors = [None if size is None else made_up(size, number) for number, size in enumerate(sizes)]
    for microbatch, tensor in enumerate(tensors):
        pair.send(microbatch, tensor)
    ungranted, consumed = len(sizes), 0
    first = min(CAPACITY, ungranted)
    pair.inlet.grant(first)
    ungranted -= first
    for _ in range(1000):
        network = pair.network
        if not (pair.outlet.wanting or pair.inlet.wanting):
            break
        steps = ["send", "receive"]
        steps += ["copy out"] * bool(pair.receiving.pending)
        steps += ["copy in"] * bool(pair.sending.pending)
        steps += ["write"] * bool(network.under_way)
        steps += ["seen"] * bool(network.unseen())
        steps += ["notice"] * bool(network.notices)
        steps += ["returns"] * bool(network.returns)
        steps += ["consume"] * (consumed < len(pair.delivered))
        match chance.choice(steps):
            case "send":
                pair.outlet.advance()
            case "receive":
                pair.inlet.advance()
            case "copy out":
                pair.receiving.finish_one()
            case "copy in":
                pair.sending.finish_one()
            case "write":
                network.finish_write(chance.randrange(len(network.under_way)))
            case "seen":
                chance.choice(network.unseen()).complete = True
            case "notice":
                pair.read_notice(chance.randrange(len(network.notices)))
            case "returns":
                pair.read_returns()
            case "consume":
                consumed += 1
                if ungranted:
                    ungranted -= 1
                    pair.inlet.grant(1)
        assert len(pair.delivered) - consumed <= CAPACITY
    assert pair.taken == len(sizes)
    assert not pair.outlet.wanting
    assert not pair.inlet.wanting
    arrived = {message.header.microbatch: message.tensor for message in pair.delivered}
    assert len(arrived) == len(sizes)
    assert all(same(arrived[microbatch], tensor) for microbatch, tensor in enumerate(tensors))


def test_nothing_is_written_before_it_is_copied_nor_delivered_before() -> None:
    pair = Pair()
    pair.inlet.grant(1)
    pair.inlet.advance()
    pair.read_returns()
    tensor = made_up(SLOT_BYTES)
    pair.send(0, tensor)
    pair.outlet.advance()
    assert pair.outlet.busy
    assert not pair.network.under_way, "the copy into the slot is not complete"
    pair.sending.finish_one()
    pair.outlet.advance()
    pair.network.finish_write(0)
    pair.read_notice(0)
    pair.inlet.advance()
    assert pair.inlet.busy
    assert not pair.delivered, "the copy out of the slot is not complete"
    pair.receiving.finish_one()
    pair.inlet.advance()
    assert same(pair.delivered[0].tensor, tensor)
    assert not pair.inlet.busy


PACKED = Header(0, FORWARD, 0, 0, *describe(torch.empty(100, dtype=torch.uint8))).pack()


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (Piece(FORWARD, SLOTS, 0, 0, 64, PACKED), "no piece"),
        (Piece(FORWARD, 0, 0, 64, 64, PACKED), "no piece"),
        (Piece(FORWARD, 0, 0, 0, 65, PACKED), "no piece"),
        (Piece(FORWARD, 0, 0, 1, 64, PACKED), "no piece"),
        (Piece(FORWARD, 0, 0, 0, 0, PACKED), "no piece"),
        (Piece(FORWARD, 0, 0, 0, 64, bytes(96)), "a header starts with"),
        (Piece(FORWARD, 0, 0, 0, 64, PACKED[:5] + b"\xff" + PACKED[6:]), "unknown tensor type"),
    ],
)
def test_impossible_pieces_are_refused(piece: Piece, reason: str) -> None:
    pair = Pair()
    pair.inlet.grant(1)
    pair.inlet.advance()
    with pytest.raises(HeaderError, match=reason):
        pair.inlet.read(piece)


def test_what_was_not_granted_is_refused() -> None:
    with pytest.raises(HeaderError, match="nothing was granted"):
        Pair().inlet.read(Piece(FORWARD, 0, 0, 0, 64, PACKED))


@pytest.mark.parametrize("slots", [1, 1 << SLOTS])
def test_impossible_returns_are_refused(slots: int) -> None:
    with pytest.raises(HeaderError, match="not all were in use"):
        Pair().outlet.read(Return(FORWARD, 0, slots))


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", bytes(200), Piece(FORWARD, 0, 0, 0, 1, PACKED).pack()[:-1]],
)
def test_other_bytes_are_no_notice(data: bytes) -> None:
    with pytest.raises(HeaderError):
        parse(data)


def test_notices_keep_what_they_say() -> None:
    for notice in (
        Piece(FORWARD, 3, 7, 1 << 40, 9, PACKED),
        Return(Direction.BACKWARD, 5, 1 << 63),
    ):
        assert parse(notice.pack()) == notice
