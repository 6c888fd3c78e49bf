"""Both ends of a link whose data goes through slots: memory of the receiver that the sender writes.

A tensor is cut into pieces that fit a slot. The sender copies a piece into a slot of its own,
has it written into the receiver's slot of the same number, and may use that number again when the
receiver has copied the piece out and returned it. So memory for slots is small and fixed, tensors
may have any size and shape, and no tensor has to be registered with the network.

How many messages may come is counted apart from slots, in credits: one for each message that is
expected and has a buffer. Returns are gathered until the sender has used half of what it has.

Nothing in here waits. `advance` does what can be done now; on a GPU, copies run on a stream of
their own and are asked whether they are complete.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from megatron_ext.pipeline.task import Direction, HeaderError
from megatron_ext.pipeline.transport.base import Message, layout_of
from megatron_ext.pipeline.transport.notice import Piece, Return


class Wire(Protocol):
    """What a link needs of the network."""

    def write(self, slot: int, nbytes: int, notice: bytes) -> bool:
        """Write the start of our slot into the neighbour's, then notify it; True if complete."""

    def written(self, slot: int) -> bool:
        """Whether the write from this slot, and its notification, are complete."""

    def notify(self, notice: bytes) -> None:
        """Send a notification without data."""


class Copier:
    """Copies between tensors and slots, on a GPU without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Start a copy of bytes once `after` is complete; None if it is complete already."""
        if self._stream is None:
            if after is not None:
                after.synchronize()
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            if source.is_cuda:
                # Its memory must not be used again before it is copied, if it is freed now.
                source.record_stream(self._stream)
            event: torch.cuda.Event = self._stream.record_event()
            return event

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory that `copy` may write at once, whoever used it before."""
        with self._on_stream():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def as_bytes(self, tensor: torch.Tensor, after: torch.cuda.Event | None) -> torch.Tensor:
        """The elements of a tensor in order, as bytes; complete when a later `copy` runs."""
        if not tensor.is_contiguous():
            with self._on_stream():
                if self._stream is not None and after is not None:
                    self._stream.wait_event(after)
                tensor = tensor.contiguous()
        return tensor.view(-1).view(torch.uint8)

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()


class _Outgoing(NamedTuple):
    """A message on its way out."""

    message: Message
    produced: torch.cuda.Event | None


class _Flight:
    """A piece between its tensor and the neighbour's slot."""

    def __init__(self, notice: Piece, copied: torch.cuda.Event | None, message: _Departure) -> None:
        self.notice = notice
        self.copied = copied
        self.message = message
        self.writing = False


class _Departure:
    """A message of which pieces are still under way."""

    def __init__(self) -> None:
        self.pieces = 0
        self.all_started = False


class Outlet:
    """The sending end of a link.

    Args:
        direction: Direction of the messages.
        peer: Rank at the other end.
        slots: Our slots.
        wire: The way to the neighbour.
        copier: Copies into slots.
        taken: Called for every message that the neighbour has taken.
    """

    sending = True

    def __init__(
        self,
        direction: Direction,
        peer: int,
        slots: list[torch.Tensor],
        wire: Wire,
        copier: Copier,
        taken: Callable[[], None],
    ) -> None:
        self.direction = direction
        self.peer = peer
        self._slots = slots
        self._free = list(range(len(slots)))
        # A slot that is in use is free again when it was returned and its write is seen to be
        # complete; either may come first.
        self._returned: set[int] = set()
        self._written: set[int] = set()
        self._credits = 0
        self._queue: deque[_Outgoing] = deque()
        self._pieces: Iterator[_Flight] | None = None
        """Pieces still to start of the message that is being cut up."""
        self._flights: list[_Flight] = []
        self._sequence = 0
        self._wire = wire
        self._copier = copier
        self._taken = taken

    @property
    def busy(self) -> bool:
        """Whether a copy or a write is under way."""
        return bool(self._flights)

    def queue(self, message: Message, produced: torch.cuda.Event | None) -> None:
        """Send a message as soon as slots and credits allow."""
        self._queue.append(_Outgoing(message, produced))

    @property
    def wanting(self) -> bool:
        """Whether there is something that the neighbour has not taken yet."""
        return bool(self._queue or self._pieces or self._flights)

    def read(self, notice: Return) -> None:
        """Take back credits and slots.

        Raises:
            HeaderError: It returns what was not lent.
        """
        slots = {slot for slot in range(len(self._slots)) if notice.slots >> slot & 1}
        if notice.slots >> len(self._slots) or slots & {*self._free, *self._returned}:
            raise HeaderError(f"slots {notice.slots:#x} were returned and not all were in use")
        self._returned |= slots
        self._credits += notice.credits
        self._free_slots()

    def _free_slots(self) -> None:
        done = self._returned & self._written
        self._free.extend(done)
        self._returned -= done
        self._written -= done

    def advance(self) -> bool:
        """Start and finish what can be; whether anything moved."""
        moved = self._start_pieces()
        under_way = []
        for flight in self._flights:
            if self._finish(flight):
                moved = True
            else:
                under_way.append(flight)
        self._flights = under_way
        self._free_slots()
        return moved

    def _start_pieces(self) -> bool:
        moved = False
        while True:
            if self._pieces is None:
                if not (self._queue and self._credits):
                    return moved
                self._credits -= 1
                self._pieces = self._cut(self._queue.popleft())
            # A piece is made only when there is a slot for it.
            if not self._free:
                return moved
            flight = next(self._pieces, None)
            if flight is None:
                self._pieces = None
            else:
                self._flights.append(flight)
            moved = True

    def _cut(self, outgoing: _Outgoing) -> Iterator[_Flight]:
        """The pieces of a message, each copied into a slot when it is asked for."""
        (header, tensor, _), produced = outgoing
        packed = header.pack()
        sequence = self._sequence
        self._sequence = (sequence + 1) % (1 << 32)
        if tensor is None or not tensor.numel():
            self._wire.notify(Piece(self.direction, 0, sequence, 0, 0, packed).pack())
            self._taken()
            return
        data = self._copier.as_bytes(tensor, produced)
        size = len(self._slots[0])
        departure = _Departure()
        for offset in range(0, len(data), size):
            slot = self._free.pop()
            part = data[offset : offset + size]
            copied = self._copier.copy(self._slots[slot][: len(part)], part, produced)
            notice = Piece(self.direction, slot, sequence, offset, len(part), packed)
            departure.pieces += 1
            departure.all_started = offset + size >= len(data)
            yield _Flight(notice, copied, departure)

    def _finish(self, flight: _Flight) -> bool:
        """Take a piece one step further; whether the neighbour has it."""
        if flight.copied is not None:
            if not _complete(flight.copied):
                return False
            flight.copied = None
        notice = flight.notice
        if flight.writing:
            done = self._wire.written(notice.slot)
        else:
            flight.writing = True
            done = self._wire.write(notice.slot, notice.length, notice.pack())
        if done:
            self._written.add(notice.slot)
            flight.message.pieces -= 1
            if flight.message.all_started and not flight.message.pieces:
                self._taken()
        return done


class _Arrival:
    """A message of which pieces have come."""

    def __init__(self, message: Message, memory: torch.Tensor) -> None:
        self.message = message
        self.memory = memory
        self.missing = len(memory)


class Inlet:
    """The receiving end of a link.

    Args:
        direction: Direction of the messages.
        peer: Rank at the other end.
        slots: Our slots, which the neighbour writes.
        capacity: Most messages that may be granted and not consumed.
        wire: The way to the neighbour.
        copier: Copies out of slots.
        deliver: Called for every message that is complete.
    """

    sending = False

    def __init__(
        self,
        direction: Direction,
        peer: int,
        slots: list[torch.Tensor],
        capacity: int,
        wire: Wire,
        copier: Copier,
        deliver: Callable[[Message], None],
    ) -> None:
        self.direction = direction
        self.peer = peer
        self._slots = slots
        self._capacity = capacity
        self._open = 0
        """Credits that the neighbour holds or has used for messages that have not come yet."""
        self._granted = 0
        """Credits not handed over yet."""
        self._emptied = 0
        """Slots not handed back yet, as bits."""
        self._arrivals: dict[int, _Arrival] = {}
        self._copies: deque[tuple[torch.cuda.Event, Piece, _Arrival]] = deque()
        self._wire = wire
        self._copier = copier
        self._deliver = deliver

    @property
    def busy(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._copies)

    @property
    def wanting(self) -> bool:
        """Whether the neighbour is to send something."""
        return bool(self._open or self._granted or self._arrivals)

    def grant(self, count: int) -> None:
        """Let the neighbour send more messages."""
        self._granted += count

    def read(self, piece: Piece) -> None:
        """Take a piece out of its slot.

        Raises:
            HeaderError: The notice or its header cannot be right.
        """
        arrival = self._arrivals.get(piece.sequence) or self._begin(piece)
        if arrival is None:
            return
        size = len(self._slots[0])
        if (
            piece.slot >= len(self._slots)
            or not 0 < piece.length <= min(size, arrival.missing)
            or piece.offset % size
            or piece.offset + piece.length > len(arrival.memory)
        ):
            raise HeaderError(f"{piece.length} bytes in slot {piece.slot} are no piece of a tensor")
        copied = self._copier.copy(
            arrival.memory[piece.offset : piece.offset + piece.length],
            self._slots[piece.slot][: piece.length],
        )
        if copied is None:
            self._copied(piece, arrival)
        else:
            self._copies.append((copied, piece, arrival))

    def advance(self) -> bool:
        """Finish copies and return what is due; whether anything moved."""
        moved = False
        while self._copies and _complete(self._copies[0][0]):
            _, piece, arrival = self._copies.popleft()
            self._copied(piece, arrival)
            moved = True
        return self._give_back() or moved

    def _begin(self, piece: Piece) -> _Arrival | None:
        """Make room for a message of which the first piece has come; None if it has no data."""
        if not self._open:
            raise HeaderError("a message came that nothing was granted for")
        header = piece.header()
        layout = layout_of(header)
        nbytes = layout.nbytes if layout else 0
        memory = self._copier.empty(nbytes)
        tensor = memory.view(layout.dtype).view(layout.shape) if layout else None
        message = Message(header, tensor)
        self._open -= 1
        if not nbytes:
            self._deliver(message)
            return None
        arrival = self._arrivals[piece.sequence] = _Arrival(message, memory)
        return arrival

    def _copied(self, piece: Piece, arrival: _Arrival) -> None:
        self._emptied |= 1 << piece.slot
        arrival.missing -= piece.length
        if not arrival.missing:
            del self._arrivals[piece.sequence]
            self._deliver(arrival.message)

    def _give_back(self) -> bool:
        slots_due = 2 * self._emptied.bit_count() >= len(self._slots)
        credits_due = self._granted and 2 * self._open <= self._capacity
        if not (slots_due or credits_due):
            return False
        self._wire.notify(Return(self.direction, self._granted, self._emptied).pack())
        self._open += self._granted
        self._granted = self._emptied = 0
        return True


def _complete(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
