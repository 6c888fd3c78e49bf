"""One decision per group of ranks that share a task's collectives.

The ranks of a tensor-, context- or expert-parallel group run every task together, but messages
reach them at different times. Left alone they would start different tasks and mismatch their
collectives. So a task may only be chosen from what has arrived on *all* of them, and all of them
must choose the same. RRFP (section 4.2) lets every rank propose and retries when proposals
differ; here the ranks share what they have, and no round is wasted.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.task import Direction, Kind, Task
from megatron_ext.pipeline.transport.base import Transport

_SPIN_S = 30e-6
_POLL_S = 100e-6
_LOOK_S = 0.05
_RING = 4096


class AgreementError(Exception):
    """A rank that shares this one's tasks is gone, or its answer did not come."""


class Agreement(Protocol):
    """How the ranks of one group come to choose the same tasks.

    Attributes:
        ranks: The global ranks of the group, this one included.
    """

    ranks: list[int]

    def start(self, arbiter: Arbiter) -> None:
        """Begin a batch."""

    def arrived(self, arbiter: Arbiter, task: Task) -> None:
        """Note that the input of `task` is on this rank."""

    def released(self, arbiter: Arbiter, count: int) -> None:
        """Note that `count` more outputs of a forward-only batch left this rank."""

    def updated(self, arbiter: Arbiter) -> None:
        """Note that the update of the batch is done on this rank."""

    def choose(self, arbiter: Arbiter) -> Task | None:
        """The group's next task, or None if there is none yet."""

    def wait(self, links: Transport, seconds: float) -> bool:
        """Sleep until there may be a next task; False if nothing happened in that time.

        Raises:
            AgreementError: Another rank of the group is gone.
        """

    def awaited(self) -> str:
        """What keeps this rank waiting beside its own messages, for errors; may be empty."""
        return ""


class Alone(Agreement):
    """A rank that shares its tasks with nobody."""

    def __init__(self) -> None:
        self.ranks = [dist.get_rank()] if dist.is_initialized() else [0]

    def start(self, arbiter: Arbiter) -> None:  # noqa: D102
        pass

    def arrived(self, arbiter: Arbiter, task: Task) -> None:  # noqa: D102
        arbiter.arrived(Direction(task.kind), task.microbatch, task.chunk)

    def released(self, arbiter: Arbiter, count: int) -> None:  # noqa: D102
        arbiter.released(count)

    def updated(self, arbiter: Arbiter) -> None:  # noqa: D102
        arbiter.updated()

    def choose(self, arbiter: Arbiter) -> Task | None:  # noqa: D102
        return arbiter.choose()

    def wait(self, links: Transport, seconds: float) -> bool:  # noqa: D102
        return links.wait(seconds)


class Progress:
    """What has arrived on a rank in this batch, as counts that only grow.

    Tasks run in microbatch order on each chunk, so all that matters of the arrivals of a chunk
    and direction is how many there are without a gap.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.released, self.updated = 2 * chunks, 2 * chunks + 1
        # Forwards and backwards by chunk, outputs that have left, updates that are done.
        self.counts = [0] * slots_of(chunks)
        self._early: set[Task] = set()

    def add(self, task: Task) -> None:
        """Count the input of `task`, once the inputs before it are here too."""
        self._early.add(task)
        slot = task.kind * self.chunks + task.chunk
        while (following := Task(task.kind, self.counts[slot], task.chunk)) in self._early:
            self._early.remove(following)
            self.counts[slot] += 1

    def advance(self, arbiter: Arbiter, counts: list[int]) -> None:
        """Bring `arbiter` from these counts to `counts`, which every rank has reached."""
        for slot, (before, after) in enumerate(zip(self.counts, counts, strict=True)):
            if slot == self.released:
                arbiter.released(after - before)
                continue
            if slot == self.updated:
                for _ in range(before, after):
                    arbiter.updated()
                continue
            direction = Direction(slot // self.chunks)
            for microbatch in range(before, after):
                arbiter.arrived(direction, microbatch, slot % self.chunks)
        self.counts = list(counts)


def slots_of(chunks: int) -> int:
    """Number of counts that a rank shares for one arbiter."""
    return 2 * chunks + 2


class _Lane:
    """What one arbiter's ranks share.

    A training batch may be under way while an evaluation runs, so there are two lanes, and what
    arrives for the one does not disturb the other.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.base = [0] * slots_of(chunks)
        self.restart()

    def restart(self) -> None:
        self.mine, self.common = Progress(self.chunks), Progress(self.chunks)


def _lane(arbiter: Arbiter) -> int:
    return int(arbiter.forward_only)


_LANES = 2


class SharedMemoryAgreement(Agreement):
    """Ranks on one node: each publishes its counts, the first decides from their minima.

    Counts and decisions are single 8-byte words in a shared page, so nothing is ever seen half
    written and no call into the kernel is needed. The first rank waits for no one: it reads what
    the others had published by then.

    Args:
        words: Zeroed shared words, the same memory on every rank.
        rank: This rank's number in the group.
        ranks: The global ranks of the group.
        presence: Tells which of them have ended; None where that is not to be watched.
    """

    def __init__(
        self,
        words: np.ndarray[Any, Any],
        rank: int,
        ranks: list[int],
        presence: Presence | None = None,
    ) -> None:
        self.ranks = ranks
        self._presence = presence
        size = len(ranks)
        self._ring = words[:_RING]
        self._taken = words[_RING : _RING + size]
        self._counts = words[_RING + size :].reshape(size, _LANES, -1)
        self._rank = rank
        self._seen = self._counts.copy()
        self._decisions = 0
        chunks = (self._counts.shape[2] - 2) // 2
        self._lanes = [_Lane(chunks) for _ in range(_LANES)]

    @staticmethod
    def words_needed(size: int, chunks: int) -> int:
        """Number of shared words for `size` ranks."""
        return _RING + size + size * _LANES * slots_of(chunks)

    def start(self, arbiter: Arbiter) -> None:  # noqa: D102
        # Counts in memory run on over batches, so that no rank has to reset another's.
        lane = self._lanes[_lane(arbiter)]
        lane.base = [b + count for b, count in zip(lane.base, lane.mine.counts, strict=True)]
        lane.restart()

    def arrived(self, arbiter: Arbiter, task: Task) -> None:  # noqa: D102
        if self._rank:
            arbiter.arrived(Direction(task.kind), task.microbatch, task.chunk)
        self._lanes[_lane(arbiter)].mine.add(task)
        self._publish(_lane(arbiter))

    def released(self, arbiter: Arbiter, count: int) -> None:  # noqa: D102
        if count:
            mine = self._lanes[_lane(arbiter)].mine
            mine.counts[mine.released] += count
            if self._rank:
                arbiter.released(count)
            self._publish(_lane(arbiter))

    def updated(self, arbiter: Arbiter) -> None:  # noqa: D102
        mine = self._lanes[_lane(arbiter)].mine
        mine.counts[mine.updated] += 1
        if self._rank:
            arbiter.updated()
        self._publish(_lane(arbiter))

    def choose(self, arbiter: Arbiter) -> Task | None:  # noqa: D102
        return self._read() if self._rank else self._decide(arbiter)

    def wait(self, links: Transport, seconds: float) -> bool:  # noqa: D102
        started = looked = time.monotonic()
        spin_until = time.perf_counter() + _SPIN_S
        while True:
            # Whatever was published since the last decision counts, also just before this call.
            if self._has_decision() if self._rank else (self._counts != self._seen).any():
                return True
            if time.perf_counter() < spin_until:
                os.sched_yield()
            elif links.wait(_POLL_S):
                return True
            elif (now := time.monotonic()) > started + seconds:
                return False
            elif now > looked + _LOOK_S:
                looked = now
                self._look_for_others()

    def awaited(self) -> str:  # noqa: D102
        if self._rank:
            return f"rank {self.ranks[0]} to choose the next task"
        behind = (self._counts < self._counts[0]).any(axis=(1, 2))
        late = [str(rank) for rank, is_late in zip(self.ranks, behind, strict=True) if is_late]
        return f"rank {' and '.join(late)} to receive what is here already" if late else ""

    def _look_for_others(self) -> None:
        if self._presence is not None and (lost := self._presence.lost()) is not None:
            raise AgreementError(f"rank {self.ranks[lost]} has ended")

    def _publish(self, number: int) -> None:
        row, lane = self._counts[self._rank, number], self._lanes[number]
        for slot, count in enumerate(lane.mine.counts):
            row[slot] = lane.base[slot] + count

    def _decide(self, arbiter: Arbiter) -> Task | None:
        if self._decisions - int(self._taken[1:].min()) >= _RING:
            return None  # a rank has not read the oldest decision in the ring yet
        self._seen = self._counts.copy()
        number = _lane(arbiter)
        lane = self._lanes[number]
        lowest = self._seen[:, number].min(axis=0).tolist()
        common = [count - base for count, base in zip(lowest, lane.base, strict=True)]
        if common != lane.common.counts:
            lane.common.advance(arbiter, common)
        task = arbiter.choose()
        if task is not None:
            self._ring[self._decisions % _RING] = _encode(self._decisions + 1, task)
            self._decisions += 1
        return task

    def _has_decision(self) -> bool:
        number = int(self._ring[self._decisions % _RING]) >> 40
        return (number & 0xFFFFFF) == (self._decisions + 1) & 0xFFFFFF

    def _read(self) -> Task | None:
        if not self._has_decision():
            return None
        task = _decode(int(self._ring[self._decisions % _RING]))
        self._decisions += 1
        self._taken[self._rank] = self._decisions
        return task


class CollectiveAgreement(Agreement):
    """Ranks on several nodes: every decision is a small all-gather on the CPU.

    Args:
        group: A gloo group of these ranks, used by nothing else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._group = group
        self._lanes: dict[int, _Lane] = {}

    def start(self, arbiter: Arbiter) -> None:  # noqa: D102
        self._lanes[_lane(arbiter)] = _Lane(arbiter.place.chunks)
        self._waiting_since: float | None = None

    def arrived(self, arbiter: Arbiter, task: Task) -> None:  # noqa: D102
        self._lanes[_lane(arbiter)].mine.add(task)

    def released(self, arbiter: Arbiter, count: int) -> None:  # noqa: D102
        mine = self._lanes[_lane(arbiter)].mine
        mine.counts[mine.released] += count

    def updated(self, arbiter: Arbiter) -> None:  # noqa: D102
        mine = self._lanes[_lane(arbiter)].mine
        mine.counts[mine.updated] += 1

    def choose(self, arbiter: Arbiter) -> Task | None:  # noqa: D102
        lane = self._lanes[_lane(arbiter)]
        counts = torch.tensor(lane.mine.counts)
        try:
            dist.all_reduce(counts, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise AgreementError(str(error)) from error
        lane.common.advance(arbiter, counts.tolist())
        task = arbiter.choose()
        if task is not None:
            self._waiting_since = None
        return task

    def wait(self, links: Transport, seconds: float) -> bool:  # noqa: D102
        # Whatever arrives on another rank must find this one in the next round.
        links.wait(_POLL_S)
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        return now < self._waiting_since + seconds

    def awaited(self) -> str:  # noqa: D102
        others = [str(rank) for rank in self.ranks if rank != dist.get_rank()]
        return f"rank {' and '.join(others)} to receive the same"


def agree(groups: Any, chunks: int, timeout_s: float) -> Agreement:
    """The agreement for this rank; every rank must call this at the same time.

    Args:
        groups: Megatron's process groups.
        chunks: Model chunks per stage.
        timeout_s: Time limit of the collectives that set it up.
    """
    ranks = _ranks_sharing_collectives(groups)
    if len(ranks) == 1:
        return Alone()
    from megatron_ext.pipeline.transport.gloo import make_group

    group = make_group(ranks, timeout_s)
    hosts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(hosts, _host(), group=group)
    if len(set(hosts)) > 1:
        return CollectiveAgreement(group)
    count = SharedMemoryAgreement.words_needed(len(ranks), chunks)
    words, presence = _shared_words(count, group)
    return SharedMemoryAgreement(words, group.rank(), ranks, presence)


class Presence:
    """Which ranks of a group on one node still run.

    Each rank locks a byte of a shared file of its own. The system lifts the lock when the process
    ends, however it ends, and children of the process do not inherit it.

    Args:
        handle: The file, open for reading and writing; closing it would lift the lock.
        rank: This rank's number in the group.
        size: Number of ranks; each must have made its `Presence` before the first `lost`.
    """

    def __init__(self, handle: int, rank: int, size: int) -> None:
        self._handle = handle
        self._others = [other for other in range(size) if other != rank]
        fcntl.lockf(handle, fcntl.LOCK_EX, 1, rank)

    def lost(self) -> int | None:
        """The number of a rank that has ended, or None."""
        for other in self._others:
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, other)
                fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, other)
                return other
        return None


def _ranks_sharing_collectives(groups: Any) -> list[int]:
    """All ranks that this one meets in a task's collectives, directly or through others."""
    mine: set[int] = {dist.get_rank()}
    for name in ("tp", "cp", "ep", "expt_tp"):
        group = getattr(groups, name, None)
        if group is not None:
            mine |= set(dist.get_process_group_ranks(group))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(mine))
    connected = {dist.get_rank()}
    while True:
        more = {rank for other in everyone if connected & set(other) for rank in other}
        if more <= connected:
            return sorted(connected)
        connected |= more


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    shared = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {shared}"


def _shared_words(count: int, group: dist.ProcessGroup) -> tuple[np.ndarray[Any, Any], Presence]:
    """Zeroed 8-byte words that all ranks of `group` map; gone when the last of them ends."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    names: list[Any] = [None] * group.size()
    if group.rank() == 0:
        handle, name = tempfile.mkstemp(prefix="rrfp-agreement-", dir=folder)
        os.ftruncate(handle, 8 * count)
    dist.all_gather_object(names, name if group.rank() == 0 else None, group=group)
    if group.rank():
        handle = os.open(names[0], os.O_RDWR)
    memory = mmap.mmap(handle, 8 * count)
    presence = Presence(handle, group.rank(), group.size())
    dist.barrier(group=group)
    if group.rank() == 0:
        os.unlink(name)
    return np.frombuffer(memory, dtype=np.int64), presence


def _encode(number: int, task: Task) -> int:
    """A decision as one word: its number, kind, chunk and microbatch."""
    word = (number & 0xFFFFFF) << 40 | task.kind << 38 | task.chunk << 30 | task.microbatch
    return word - (1 << 64) if word >> 63 else word


def _decode(word: int) -> Task:
    return Task(Kind(word >> 38 & 3), word & (1 << 30) - 1, word >> 30 & 0xFF)
