"""Tensors through pinned memory, with the CPU in the role of the GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.pipeline.transport.gloo import GlooTransport
from megatron_ext.pipeline.transport.pinned import PinnedMemory
from tests.pipeline.transport.links import BACKWARD, FORWARD, made_up, open_stage, same
from tests.ranks import check_ranks, run_ranks


def copies(rank: int) -> None:
    from megatron_ext import cpu

    cpu.enable()
    pinned = PinnedMemory(torch.device("cuda", 0))
    tensors = [
        torch.randn(3, 5),
        torch.randn(64, 64, dtype=torch.bfloat16),
        torch.randn(8, 6).t(),
        torch.arange(7),
        torch.empty(0, 4),
        torch.tensor(2.5),
    ]
    for tensor in tensors:
        host = pinned.to_host(tensor, torch.cuda.Event())
        assert same(host, tensor)
        back = pinned.to_device(host)
        assert same(back, tensor)
        kept = back.clone()
        pinned.to_host(torch.full((4096,), 7.0), None)  # the memory is used again
        assert same(back, kept)


def exchange(rank: int) -> None:
    from megatron_ext import cpu

    cpu.enable()
    stage = open_stage("gloo, staged", rank, 2)
    assert isinstance(stage.links, GlooTransport)
    # Below and above what travels with its header, and growing.
    sizes = [0, 16, 1 << 16, 1 << 20, 1 << 12, 3 << 20]
    direction = FORWARD if rank == 0 else BACKWARD
    other = BACKWARD if rank == 0 else FORWARD
    stage.links.expect(other, len(sizes))
    for microbatch, size in enumerate(sizes):
        stage.send(direction, microbatch, made_up(size, rank, microbatch))
    for (header, tensor, _), size in zip(stage.receive(len(sizes)), sizes, strict=True):
        assert same(tensor, made_up(size, 1 - rank, header.microbatch))
    assert stage.links.flush(20)


@pytest.mark.multiprocess
def test_copies_keep_every_bit() -> None:
    check_ranks(run_ranks(1, copies))


@pytest.mark.multiprocess
def test_messages_through_pinned_memory() -> None:
    check_ranks(run_ranks(2, exchange))
