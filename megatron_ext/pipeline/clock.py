"""How the clocks of the ranks stand to each other, measured over the run's key-value store.

Ranks of one machine read the same clock. For every other machine one rank exchanges time stamps
with rank 0, and the exchange that took least time counts: rank 0 read its clock somewhere between
the two readings here, so the error is at most half of that time.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from megatron_ext.errors import PipelineError
from megatron_ext.pipeline.clock_reading import ClockReading

__all__ = ["ClockReading", "compare_clocks"]

_EXCHANGES = 16


def compare_clocks(
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    store: Any = None,
    clock: Callable[[], float] = time.perf_counter,
    machine: str | None = None,
) -> ClockReading:
    """Compare clocks; every rank must call this, at about the same time.

    Later calls over the same store give what the first one found.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: How long to wait for another rank.
        store: A `torch.distributed.Store` that all ranks share; that of the default group if None.
        clock: Reads the clock, in seconds.
        machine: Names the clock; equal for ranks that read the same one.

    Raises:
        PipelineError: A rank did not answer in time.
    """
    if store is None:
        store = distributed_c10d._get_default_store()
    store = distributed_c10d.PrefixStore("megatron_ext/clock", store)
    wait = timedelta(seconds=timeout_s)

    def get(key: str) -> str:
        try:
            store.wait([key], wait)
            return str(store.get(key).decode())
        except RuntimeError as error:
            raise PipelineError(
                f"rank {rank}: --rrfp-trace: comparing clocks failed, another rank did not answer "
                f"within {timeout_s:g} s or has died ({str(error).splitlines()[0]})"
            ) from error

    store.set(f"machine/{rank}", machine or _machine())
    if rank == 0 and not store.check(["run"]):
        machines = [get(f"machine/{other}") for other in range(world_size)]
        speakers = [machines.index(name) for name in machines]
        store.set("run", json.dumps([secrets.token_hex(8), speakers]))
        for speaker in sorted(set(speakers) - {0}):
            for number in range(_EXCHANGES):
                get(f"ask/{speaker}/{number}")
                store.set(f"answer/{speaker}/{number}", repr(clock()))
    run, speakers = json.loads(get("run"))
    speaker = speakers[rank]
    if speaker == rank and rank != 0 and not store.check([f"offset/{rank}"]):
        exchanges = []
        for number in range(_EXCHANGES):
            before = clock()
            store.set(f"ask/{rank}/{number}", "")
            there = float(get(f"answer/{rank}/{number}"))
            after = clock()
            exchanges.append(((after - before) / 2, (before + after) / 2 - there))
        uncertainty, offset = min(exchanges)
        store.set(f"offset/{rank}", json.dumps([offset, uncertainty]))
    offset, uncertainty = (0.0, 0.0) if speaker == 0 else json.loads(get(f"offset/{speaker}"))
    return ClockReading(run, socket.gethostname(), offset, uncertainty)


def _machine() -> str:
    """Equal for processes whose monotonic clock is the same: one boot, one time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/time")
    try:
        return f"{boot.read_text().strip()} {os.readlink(namespace)}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
