"""Clocks of several machines, compared over a real store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_ext.errors import PipelineError
from megatron_ext.pipeline.clock import ClockReading, compare_clocks

# Machine and clock error of every rank.
RANKS = [("a", 0.0), ("a", 0.0), ("b", 5.0), ("c", -3.0), ("b", 5.0)]


def test_offsets_between_machines() -> None:
    store = dist.HashStore()

    def compare(rank: int) -> ClockReading:
        machine, error = RANKS[rank]
        return compare_clocks(
            rank,
            len(RANKS),
            timeout_s=20,
            store=store,
            clock=lambda: time.perf_counter() + error,
            machine=machine,
        )

    with ThreadPoolExecutor(len(RANKS)) as pool:
        readings = list(pool.map(compare, range(len(RANKS))))
        assert list(pool.map(compare, range(len(RANKS)))) == readings
    for reading, (machine, error) in zip(readings, RANKS, strict=True):
        assert abs(reading.offset_s - error) <= reading.uncertainty_s < 0.05
        assert (reading.uncertainty_s == 0) is (machine == "a")
    assert readings[2] == readings[4]
    assert len({reading.run for reading in readings}) == 1


def test_a_rank_that_does_not_answer_is_named() -> None:
    with pytest.raises(PipelineError, match="rank 0: --rrfp-trace: comparing clocks failed"):
        compare_clocks(0, 2, timeout_s=0.1, store=dist.HashStore())
