"""The gloo transport between two real processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_ext.pipeline.task import Direction, Header
from megatron_ext.pipeline.transport.base import DTYPE_CODES, Message, TransportError, describe
from megatron_ext.pipeline.transport.gloo import GlooTransport, make_group
from tests.ranks import check_ranks, run_ranks

pytestmark = pytest.mark.multiprocess

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
CAPACITY = 3


def connect(rank: int) -> GlooTransport:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return GlooTransport(
        make_group([0, 1], 20),
        sources={BACKWARD: 1} if rank == 0 else {FORWARD: 0},
        destinations={FORWARD: 1} if rank == 0 else {BACKWARD: 0},
        capacity=CAPACITY,
        device=torch.device("cpu"),
    )


def message(direction: Direction, microbatch: int, tensor: torch.Tensor | None) -> Message:
    dtype, shape = describe(tensor)
    return Message(Header(0, direction, microbatch, 0, dtype, shape), tensor)


def receive(transport: GlooTransport) -> Message:
    while (received := transport.take()) is None:
        assert transport.wait(20)
    return received


def tensors() -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (5, 7), generator=generator)
    every_dtype = [values.to(dtype) for dtype in DTYPE_CODES]
    large = torch.randn(3, 1 << 20, generator=generator)
    return [*every_dtype, None, torch.empty(0, 4), torch.tensor(3.0), large, large[:, ::2]]


def test_whatever_is_sent_arrives() -> None:
    check_ranks(run_ranks(2, _exchange))


def _exchange(rank: int) -> None:
    transport = connect(rank)
    mine, theirs = (FORWARD, BACKWARD) if rank == 0 else (BACKWARD, FORWARD)
    transport.expect(theirs, len(tensors()))
    for microbatch, tensor in enumerate(tensors()):
        transport.send(message(mine, microbatch, tensor))
    for microbatch, tensor in enumerate(tensors()):
        header, received, _ = receive(transport)
        transport.consumed(theirs)
        assert (header.direction, header.microbatch) == (theirs, microbatch)
        if tensor is None:
            assert received is None
        else:
            assert received is not None
            assert received.dtype == tensor.dtype
            assert torch.equal(received.float(), tensor.float())
            assert received.shape == tensor.shape
    assert transport.flush(20)
    assert transport.sent(mine) == len(tensors())
    dist.barrier()


def test_buffers_are_bounded_and_the_sender_does_not_wait() -> None:
    check_ranks(run_ranks(2, _outrun))


def _outrun(rank: int) -> None:
    transport, count = connect(rank), 4 * CAPACITY
    tensor = torch.ones(1 << 18)
    dist.barrier()
    if rank == 0:
        started = time.perf_counter()
        for microbatch in range(count):
            transport.send(message(FORWARD, microbatch, tensor))
        assert time.perf_counter() - started < 0.1
        time.sleep(0.5)  # the receiver takes only what it has buffers for
        assert transport.sent(FORWARD) <= CAPACITY
        assert not transport.flush(0.1)
        dist.barrier()
        assert transport.flush(20)
    else:
        transport.expect(FORWARD, count)
        dist.barrier()
        for microbatch in range(count):
            assert receive(transport).header.microbatch == microbatch
            transport.consumed(FORWARD)
    dist.barrier()


def test_nothing_is_received_before_it_is_expected() -> None:
    check_ranks(run_ranks(2, _too_early))


def _too_early(rank: int) -> None:
    transport = connect(rank)
    if rank == 0:
        transport.send(message(FORWARD, 0, torch.ones(3)))
        assert not transport.flush(0.3)
        dist.barrier()
        assert transport.flush(20)
    else:
        assert not transport.wait(0.3)
        dist.barrier()
        transport.expect(FORWARD, 1)
        assert receive(transport).header.microbatch == 0
    dist.barrier()


def test_a_lost_peer_is_named() -> None:
    ranks = run_ranks(2, _lose_peer)
    assert ranks[0].exit_code == -signal.SIGKILL
    check_ranks(ranks[1:])


def _lose_peer(rank: int) -> None:
    transport = connect(rank)
    dist.barrier()
    if rank == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    transport.expect(FORWARD, 1)
    with pytest.raises(TransportError) as lost:
        transport.wait(20)
    assert (lost.value.peer, lost.value.direction, lost.value.sending) == (0, FORWARD, False)
    with pytest.raises(TransportError):  # it stays lost
        transport.take()
