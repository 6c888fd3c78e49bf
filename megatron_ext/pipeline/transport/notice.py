"""What NIXL notifications between two stages say: where a piece of a message is, what is free.

Like headers, notices are fixed structs that are read field by field and checked.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from megatron_ext.pipeline.task import HEADER_BYTES, Direction, Header, HeaderError


class Piece(NamedTuple):
    """A part of a message's tensor has been written into a slot of the receiver."""

    direction: Direction
    slot: int
    sequence: int
    """Running number of the message on its link; the pieces of one message share it."""
    offset: int
    """Where in the tensor this piece belongs, in bytes."""
    length: int
    """Bytes in the slot; 0 for a message without data, which has no slot."""
    packed_header: bytes

    def pack(self) -> bytes:
        """As the bytes of a notification."""
        numbers = (self.direction, self.slot, self.sequence, self.offset, self.length)
        return _STRUCT.pack(_PIECE, *numbers) + self.packed_header

    def header(self) -> Header:
        """The message's header.

        Raises:
            HeaderError: It is malformed, or of a message in the other direction.
        """
        header = Header.unpack(self.packed_header)
        if header.direction is not self.direction:
            raise HeaderError(f"a {header.direction.payload} on the link of {self.direction.name}")
        return header


class Return(NamedTuple):
    """What the receiver gives back to the sender of a link."""

    direction: Direction
    """The direction of the messages, opposite to that of this notice."""
    credits: int
    """How many more messages may be sent."""
    slots: int
    """Slots that are free again: bit i stands for slot i."""

    def pack(self) -> bytes:
        """As the bytes of a notification."""
        return _STRUCT.pack(_RETURN, self.direction, 0, self.credits, self.slots, 0)


def parse(data: bytes) -> Piece | Return:
    """Read one notification.

    Raises:
        HeaderError: It is no notice of this protocol.
    """
    if len(data) < _STRUCT.size:
        raise HeaderError(f"a notice has at least {_STRUCT.size} bytes, not {len(data)}")
    kind, direction, slot, number, first, second = _STRUCT.unpack_from(data)
    rest = len(data) - _STRUCT.size
    if direction > Direction.BACKWARD:
        raise HeaderError(f"direction {direction} is neither forward (0) nor backward (1)")
    if kind == _PIECE and rest == HEADER_BYTES:
        return Piece(Direction(direction), slot, number, first, second, data[_STRUCT.size :])
    if kind == _RETURN and rest == 0:
        return Return(Direction(direction), number, first)
    raise HeaderError(f"a notice of kind {kind!r} with {rest} more bytes")


_PIECE, _RETURN = b"MXP1", b"MXR1"  # the last character is the protocol's version
# Kind, direction, slot, number, and two fields of 8 bytes.
_STRUCT = struct.Struct("<4sBxHIQQ")
