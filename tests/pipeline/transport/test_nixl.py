"""What only the NIXL transport has: a start in which stages greet each other, and heartbeats."""

from __future__ import annotations

import importlib.util
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_ext.pipeline.transport.base import TransportError
from megatron_ext.pipeline.transport.nixl import NixlTransport
from tests.pipeline.transport.links import BACKWARD, open_stage, same
from tests.ranks import check_ranks, run_ranks

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not importlib.util.find_spec("nixl"),
        reason="nixl is not installed: pip install megatron_ext[nixl]",
    ),
]


def test_a_stage_that_is_ready_early_loses_nothing() -> None:
    """What it sends to a neighbour that still waits for another one is kept."""
    check_ranks(run_ranks(3, _greet_late, timeout_s=60))


def test_silent_peer() -> None:
    """A process that stands still is lost after the time limit, though nothing is closed."""
    waiting, _ = run_ranks(2, _stop_a_peer, timeout_s=60)
    check_ranks([waiting])


def _greet_late(rank: int) -> None:
    greet = NixlTransport._greet

    def late(self: NixlTransport, timeout_s: float) -> None:
        if rank == 2:
            time.sleep(1.0)
        greet(self, timeout_s)

    NixlTransport._greet = late  # type: ignore[method-assign]
    stage = open_stage("nixl", rank, 3)
    if rank == 0:
        stage.links.expect(BACKWARD, 1)
        (message,) = stage.receive(1, seconds=10)
        assert same(message.tensor, torch.ones(3))
    if rank == 1:
        stage.send(BACKWARD, 0, torch.ones(3))
        assert stage.links.flush(10)
    dist.barrier()


def _stop_a_peer(rank: int) -> None:
    stage = open_stage("nixl", rank, 2, timeout_s=3)
    process_ids: list[int] = [0, 0]
    dist.all_gather_object(process_ids, os.getpid())
    if rank == 1:
        time.sleep(60)
    os.kill(process_ids[1], signal.SIGSTOP)
    stage.links.expect(BACKWARD, 1)
    try:
        started = time.monotonic()
        with pytest.raises(TransportError, match="nothing heard of it for 3 s") as caught:
            assert stage.links.wait(20)
        assert 2 < time.monotonic() - started < 10
        assert (caught.value.peer, caught.value.direction) == (1, BACKWARD)
    finally:
        os.kill(process_ids[1], signal.SIGKILL)
