"""A stage with links of any transport, for tests on real processes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.pipeline.task import Direction, Header
from megatron_ext.pipeline.transport.base import Message, Transport, describe
from megatron_ext.pipeline.transport.gloo import GlooTransport, make_group
from megatron_ext.pipeline.transport.nccl import NcclTransport, open_channels
from megatron_ext.pipeline.transport.nixl import NixlTransport

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
CAPACITY = 4


@dataclass
class Stage:
    """One stage of a pipeline, and what a test does with its links."""

    rank: int
    depth: int
    sources: dict[Direction, int]
    destinations: dict[Direction, int]
    links: Transport

    def send(
        self, direction: Direction, microbatch: int, tensor: torch.Tensor | None, chunk: int = 0
    ) -> None:
        dtype, shape = describe(tensor)
        self.links.send(Message(Header(0, direction, microbatch, chunk, dtype, shape), tensor))

    def receive(self, count: int, seconds: float = 20.0) -> list[Message]:
        """Take and consume that many messages."""
        messages = []
        while len(messages) < count:
            if message := self.links.take():
                messages.append(message)
                self.links.consumed(message.header.direction)
            else:
                assert self.links.wait(seconds), f"{len(messages)} of {count} messages came"
        return messages

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait with the links, which must report what is sent, until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.links.wait(0.1)
            assert time.monotonic() < deadline, "it never became true"


def open_stage(
    kind: str, rank: int, depth: int, *, timeout_s: float = 30.0, ring: bool = False
) -> Stage:
    """Join the pipeline of all ranks.

    Args:
        kind: Of transport; "nccl" has groups of gloo in the role of its tensor channels. "gloo,
            staged" takes the CPU for a GPU, which `cpu.enable` must have prepared.
        rank: This stage.
        depth: How many stages there are.
        timeout_s: The transport's limit.
        ring: Whether the last stage also feeds the first one, as virtual stages need.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=depth)
    before = (rank - 1) % depth if ring else rank - 1
    after = (rank + 1) % depth if ring else rank + 1
    sources, destinations = {}, {}
    if before >= 0:
        sources[FORWARD] = destinations[BACKWARD] = before
    if after < depth:
        sources[BACKWARD] = destinations[FORWARD] = after
    device = torch.device("cpu")
    group = make_group(list(range(depth)), timeout_s)
    ends = {"sources": sources, "destinations": destinations}
    rest = {"capacity": CAPACITY, "device": device}
    links: Transport
    match kind:
        case "gloo":
            links = GlooTransport(group, **ends, **rest)
        case "gloo, staged":
            links = GlooTransport(group, **ends, capacity=CAPACITY, device=torch.device("cuda", 0))
        case "nixl":
            links = NixlTransport(group, **ends, **rest, timeout_s=timeout_s)
        case _:
            channels = open_channels(
                group, **ends, device=device, timeout_s=timeout_s, backend="gloo"
            )
            links = NcclTransport(group, channels, **ends, **rest, timeout_s=timeout_s)
    return Stage(rank, depth, sources, destinations, links)


def made_up(nbytes: int, *seed: object) -> torch.Tensor:
    """That many bytes, the same in every process for the same seed."""
    data = bytearray(random.Random(repr(seed)).randbytes(min(nbytes, 1 << 16)))
    tensor = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
    return tensor.repeat(-(-nbytes // max(1, len(data))))[:nbytes]


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors agree in type, shape and every bit."""
    if one is None or other is None:
        return one is other
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))
    )
