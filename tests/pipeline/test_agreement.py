"""Ranks that share collectives choose the same tasks, whatever reaches them when."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.pipeline.agreement import (
    Agreement,
    AgreementError,
    CollectiveAgreement,
    Progress,
    SharedMemoryAgreement,
    agree,
)
from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import HINTS, Place
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.pipeline.transport.base import Transport
from megatron_ext.pipeline.transport.gloo import make_group
from tests.ranks import check_ranks, run_ranks

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD
READINESS_DRIVEN = [name for name, hint in HINTS.items() if not hint.fixed_order]


@given(
    size=st.integers(2, 4),
    chunks=st.integers(1, 2),
    hint=st.sampled_from(READINESS_DRIVEN),
    limit=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_shared_memory_ranks_run_the_same_tasks(
    size: int, chunks: int, hint: str, limit: int, seed: int
) -> None:
    """Ranks step in random order; each message reaches each rank at another time."""
    chance = random.Random(seed)
    words = np.zeros(SharedMemoryAgreement.words_needed(size, chunks), dtype=np.int64)
    place = Place(stage=1, depth=3, microbatches=4, live_limit=limit, chunks=chunks)
    ranks = [SharedMemoryAgreement(words, number, list(range(size))) for number in range(size)]
    for _ in range(3):  # batches
        arbiters = [Arbiter(place, HINTS[hint](place)) for _ in ranks]
        for rank, arbiter in zip(ranks, arbiters, strict=True):
            rank.start(arbiter)
        orders: list[list[Task]] = [[] for _ in ranks]
        mail = [
            [Task(FORWARD, m, c) for m in range(place.microbatches) for c in range(chunks)]
            for _ in ranks
        ]
        steps = 0
        while not all(arbiter.finished for arbiter in arbiters):
            steps += 1
            assert steps < 20_000, "no progress"
            number = chance.randrange(size)
            rank, arbiter = ranks[number], arbiters[number]
            if arbiter.finished:
                continue
            if mail[number] and chance.random() < 0.5:
                message = mail[number].pop(chance.randrange(len(mail[number])))
                rank.arrived(arbiter, message)
            task = rank.choose(arbiter)
            if task is None:
                continue
            orders[number].append(task)
            arbiter.completed(task)
            if task.kind is FORWARD:  # its gradient comes back some time
                mail[number].append(task._replace(kind=BACKWARD))
        assert all(order == orders[0] for order in orders)
        assert max(arbiter.peak_live for arbiter in arbiters) <= limit * chunks


def test_progress_counts_without_gaps() -> None:
    progress = Progress(chunks=2)
    for microbatch in (2, 0):
        progress.add(Task(FORWARD, microbatch, 1))
    assert progress.counts == [0, 1, 0, 0, 0, 0]
    progress.add(Task(FORWARD, 1, 1))
    assert progress.counts == [0, 3, 0, 0, 0, 0]
    progress.add(Task(BACKWARD, 0, 0))
    assert progress.counts == [0, 3, 1, 0, 0, 0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("across_nodes", [False, True])
def test_real_processes_with_different_arrivals(across_nodes: bool) -> None:
    check_ranks(run_ranks(2, _choose_together, across_nodes))


def _choose_together(rank: int, across_nodes: bool) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    agreement = _agreement(across_nodes)
    chance = random.Random(rank)
    place = Place(stage=1, depth=3, microbatches=30, live_limit=4)
    for _ in range(2):
        arbiter = Arbiter(place, HINTS["bfw"](place))
        agreement.start(arbiter)
        mail = [Task(FORWARD, m) for m in range(place.microbatches)]
        order: list[Task] = []
        while not arbiter.finished:
            if mail and chance.random() < 0.6:
                agreement.arrived(arbiter, mail.pop(chance.randrange(min(3, len(mail)))))
            task = agreement.choose(arbiter)
            if task is None:
                time.sleep(chance.random() * 1e-4)
                continue
            order.append(task)
            arbiter.completed(task)
            if task.kind is FORWARD:
                mail.append(task._replace(kind=BACKWARD))
        orders: list[Any] = [None, None]
        dist.all_gather_object(orders, order)
        assert orders[0] == orders[1]


@pytest.mark.multiprocess
@pytest.mark.parametrize("across_nodes", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_noticed_by_the_other(victim: int, across_nodes: bool) -> None:
    ranks = run_ranks(2, _lose_a_rank, victim, across_nodes)
    assert ranks.pop(victim).exit_code == -signal.SIGKILL
    check_ranks(ranks)


def _lose_a_rank(rank: int, victim: int, across_nodes: bool) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    agreement = _agreement(across_nodes)
    place = Place(stage=1, depth=3, microbatches=2, live_limit=2)
    arbiter = Arbiter(place, HINTS["bf"](place))
    agreement.start(arbiter)
    assert agreement.choose(arbiter) is None
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(AgreementError, match=f"rank {victim} has ended|gloo"):
        _wait_for_a_task(agreement, arbiter)
    assert time.monotonic() - started < 10


def _wait_for_a_task(agreement: Agreement, arbiter: Arbiter) -> None:
    while agreement.choose(arbiter) is None:
        assert agreement.wait(_SilentLinks(), 20)


@pytest.mark.multiprocess
@pytest.mark.parametrize("across_nodes", [False, True])
def test_waiting_ends_without_progress(across_nodes: bool) -> None:
    check_ranks(run_ranks(2, _wait_in_vain, across_nodes))


def _wait_in_vain(rank: int, across_nodes: bool) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    agreement = _agreement(across_nodes)
    place = Place(stage=1, depth=3, microbatches=2, live_limit=2)
    arbiter = Arbiter(place, HINTS["bf"](place))
    agreement.start(arbiter)
    if rank == 0:
        agreement.arrived(arbiter, Task(FORWARD, 0))  # which rank 1 never receives
    started = time.monotonic()
    try:
        while agreement.choose(arbiter) is None and agreement.wait(_SilentLinks(), 0.5):
            pass
    except AgreementError:
        assert across_nodes  # the other rank stopped waiting first, and ended
    assert time.monotonic() - started < 10
    expected = f"rank {1 - rank} to receive" if rank == 0 or across_nodes else "rank 0 to choose"
    assert agreement.awaited().startswith(expected)


class _SilentLinks(Transport):
    """Links on which nothing ever happens."""

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


def _agreement(across_nodes: bool) -> Agreement:
    groups = type("Groups", (), {"tp": dist.group.WORLD})
    if across_nodes:
        return CollectiveAgreement(make_group([0, 1], 20))
    agreement = agree(groups, chunks=1, timeout_s=20)
    assert isinstance(agreement, SharedMemoryAgreement)
    return agreement


@pytest.mark.multiprocess
def test_an_agreement_takes_at_most_fifty_microseconds() -> None:
    check_ranks(run_ranks(2, _time_agreement))


def _time_agreement(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    agreement = _agreement(across_nodes=False)
    place = Place(stage=1, depth=3, microbatches=2000, live_limit=16)
    arbiter = Arbiter(place, HINTS["bf"](place))
    agreement.start(arbiter)
    times = []
    dist.barrier()
    for microbatch in range(place.microbatches):
        agreement.arrived(arbiter, Task(FORWARD, microbatch))
        started = time.perf_counter()
        for kind in (FORWARD, BACKWARD):
            if kind is BACKWARD:
                agreement.arrived(arbiter, Task(BACKWARD, microbatch))
                started = time.perf_counter()
            while (task := agreement.choose(arbiter)) is None:
                pass
            times.append(time.perf_counter() - started)
            assert task == Task(kind, microbatch)
            arbiter.completed(task)
    median = statistics.median(times)
    print(f"rank {rank}: median {median * 1e6:.1f} us")
    assert median <= 50e-6


def test_what_arrives_between_a_decision_and_the_wait_is_noticed() -> None:
    class SilentLinks:
        def wait(self, seconds: float) -> bool:
            time.sleep(seconds)
            return False

    words = np.zeros(SharedMemoryAgreement.words_needed(2, 1), dtype=np.int64)
    place = Place(stage=1, depth=3, microbatches=2, live_limit=2)
    first, other = (SharedMemoryAgreement(words, number, [0, 1]) for number in range(2))
    arbiters = [Arbiter(place, HINTS["bf"](place)) for _ in range(2)]
    for rank, arbiter in zip((first, other), arbiters, strict=True):
        rank.start(arbiter)
    first.arrived(arbiters[0], Task(FORWARD, 0))
    assert first.choose(arbiters[0]) is None
    other.arrived(arbiters[1], Task(FORWARD, 0))
    assert first.wait(SilentLinks(), 0.5)  # type: ignore[arg-type]
    assert first.choose(arbiters[0]) == Task(FORWARD, 0)
