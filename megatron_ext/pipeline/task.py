"""Tasks of a pipeline stage and the header that every message between stages carries."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MAX_DIMENSIONS = 8


class Direction(IntEnum):
    """Which way a task works, and which way its message travels."""

    FORWARD = 0
    """Activations, from a stage to the next one."""
    BACKWARD = 1
    """Gradients, from a stage to the one before."""

    @property
    def payload(self) -> str:
        """What travels in this direction, as a reader would name it."""
        return "activation" if self is Direction.FORWARD else "gradient"


class Kind(IntEnum):
    """What a task computes. The first two are also the directions of messages."""

    FORWARD = 0
    """A chunk's output from its input."""
    BACKWARD = 1
    """The gradient of a chunk's input, and where nothing is split off, of its weights."""
    WEIGHT = 2
    """The weight gradients that a backward left for later."""
    UPDATE = 3
    """The end of a batch whose update is done, where the next batch has begun by then."""


class Task(NamedTuple):
    """One piece of work on one microbatch and one model chunk of a stage."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.UPDATE:
            return "update"
        chunk = f" on chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind.name.lower()} of microbatch {self.microbatch}{chunk}"


class HeaderError(ValueError):
    """Bytes that are no header of this protocol."""


class Header(NamedTuple):
    """What a message says of its tensor.

    A header is a fixed struct: it is read field by field and checked, never unpickled, so a
    stray or corrupt message ends in a `HeaderError`.
    """

    batch: int
    """Running number of the batch, training and evaluation counted together."""
    direction: Direction
    microbatch: int
    chunk: int
    """The receiving stage's model chunk."""
    dtype: int
    """Code of the tensor's type; 0 means that the message has no tensor."""
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        """The header as `HEADER_BYTES` bytes, little-endian."""
        padded = self.shape + (0,) * (MAX_DIMENSIONS - len(self.shape))
        return _STRUCT.pack(
            _MAGIC,
            self.direction,
            self.dtype,
            len(self.shape),
            self.chunk,
            self.batch,
            self.microbatch,
            *padded,
        )

    @staticmethod
    def unpack(data: bytes | memoryview) -> Header:
        """Read and check the header at the start of `data`.

        Raises:
            HeaderError: `data` is too short, of another version, or has a field out of range.
        """
        if len(data) < HEADER_BYTES:
            raise HeaderError(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
        magic, direction, dtype, dimensions, chunk, batch, microbatch, *shape = _STRUCT.unpack_from(
            data
        )
        if magic != _MAGIC:
            raise HeaderError(f"a header starts with {_MAGIC!r}, not {magic!r}")
        if direction > Direction.BACKWARD:
            raise HeaderError(f"direction {direction} is neither forward (0) nor backward (1)")
        if dimensions > MAX_DIMENSIONS or any(shape[dimensions:]):
            raise HeaderError(f"{dimensions} dimensions do not go with shape {shape}")
        return Header(
            batch, Direction(direction), microbatch, chunk, dtype, tuple(shape[:dimensions])
        )


_MAGIC = b"MXP1"  # the last character is the protocol's version
_STRUCT = struct.Struct(f"<4sBBBBII{MAX_DIMENSIONS}Q")
HEADER_BYTES = _STRUCT.size
"""Size of a packed header."""
