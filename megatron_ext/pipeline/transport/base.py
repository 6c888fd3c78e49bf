"""What every transport offers to the stage executor, and the types of its messages."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, Protocol

import torch

from megatron_ext.pipeline.task import Direction, Header, HeaderError

# The code of each type in a header. Codes are part of the protocol: add, never renumber.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float64: 4,
    torch.float8_e4m3fn: 5,
    torch.float8_e5m2: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.int16: 9,
    torch.int32: 10,
    torch.int64: 11,
    torch.bool: 12,
}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}

# Larger than any activation; a header that asks for more is corrupt.
MAX_TENSOR_BYTES = 1 << 40


class TransportError(Exception):
    """A link that cannot go on.

    Attributes:
        peer: Rank, within the pipeline group, at the other end.
        direction: Direction of the messages on the link.
        sending: Whether this end sends on the link.
    """

    def __init__(self, reason: str, peer: int, direction: Direction, sending: bool) -> None:
        super().__init__(reason)
        self.peer = peer
        self.direction = direction
        self.sending = sending


class Message(NamedTuple):
    """A header and its tensor; None where the sender had no tensor (no gradient, say)."""

    header: Header
    tensor: torch.Tensor | None
    arrived: float = 0.0
    """Receiver's `time.perf_counter` when all of it was there; 0 on the way out."""


class Transport(Protocol):
    """One stage's links: per direction at most one neighbour to receive from, one to send to.

    Only the compute thread calls these methods, save `wake`. None of them waits for a neighbour,
    save `wait` and `flush`. A broken link is reported by `wait`, `take` and `flush` as a
    `TransportError`.
    """

    def expect(self, direction: Direction, count: int) -> None:
        """Allow `count` more messages of `direction` to be received."""

    def send(self, message: Message) -> None:
        """Queue a message; its tensor must not be written to any more."""

    def sent(self, direction: Direction) -> int:
        """Messages of `direction` that the neighbour has taken, since the start."""

    def take(self) -> Message | None:
        """The next arrived message, in order of arrival, or None."""

    def consumed(self, direction: Direction) -> None:
        """Free the receive buffer of one taken message."""

    def wait(self, seconds: float) -> bool:
        """Sleep until something arrives or breaks; False if nothing did in time."""

    def wake(self) -> None:
        """End a `wait`, or the next one; from any thread."""

    def report_sent(self, on: bool) -> None:
        """Whether `wait` also ends when a neighbour has taken a message."""

    def flush(self, seconds: float) -> bool:
        """Sleep until every queued message has been taken; False if not in time."""

    def close(self) -> None:
        """Stop the threads and drop what is queued."""


def describe(tensor: torch.Tensor | None) -> tuple[int, tuple[int, ...]]:
    """Type code and shape of a tensor for a header."""
    if tensor is None:
        return 0, ()
    return DTYPE_CODES[tensor.dtype], tuple(tensor.shape)


class Layout(NamedTuple):
    """Type, shape and size of a tensor in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def layout_of(header: Header) -> Layout | None:
    """What the tensor behind `header` looks like; None if there is none.

    Raises:
        HeaderError: Unknown type, or a size that no activation has.
    """
    return _layout(header.dtype, header.shape)


@functools.lru_cache(maxsize=256)
def _layout(code: int, shape: tuple[int, ...]) -> Layout | None:
    if code == 0:
        return None
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise HeaderError(f"unknown tensor type {code}")
    nbytes = dtype.itemsize * math.prod(shape)
    if nbytes > MAX_TENSOR_BYTES:
        raise HeaderError(f"a tensor of shape {shape} is too large")
    return Layout(dtype, shape, nbytes)
