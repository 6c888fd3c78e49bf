"""Measured times: what the traces of a short run say of its tasks, messages and waits.

Times are milliseconds on the first rank's clock.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.simulate.jitter_law import Array
from megatron_ext.simulate.outcome import RanTask
from megatron_ext.simulate.rank_trace import RankTrace, read_rank
from megatron_ext.simulate.task_times import TaskTimes

_SLACK = 2e-3  # of times that were rounded, in ms
_COMPUTED = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


@dataclass(frozen=True)
class TracedBatch:
    """One training iteration, as measured."""

    iteration: int
    times: TaskTimes
    makespan: float
    """From the first stage's start to the end of the last task on any stage; where batches
    overlap, from the end of the last task of the batch before."""
    orders: list[list[Task]]
    """Tasks as they ran, [replica * stages + stage]."""
    hops: tuple[Array, Array]
    """Latency of every activation and gradient, by the sending row; the run's where unknown."""


@dataclass(frozen=True)
class TracedRun:
    """A run: its shape, its batches, and what came on top of computing."""

    stages: int
    chunks: int
    replicas: int
    microbatches: int
    weight_pieces: int
    """Tasks that make up the weight gradient of a microbatch; 0 where it is not split off."""
    peak_live: int
    batches: list[TracedBatch]
    hop_latency: float
    """Median time from the end of a task to the arrival of its message, and until a stage that
    waits for it begins, less the overhead of the task that it then runs."""
    task_overhead: float
    """Mean time between two tasks with no wait between them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the traces say of the run's settings, such as hint and live limit."""
    continuous: bool = False
    """Whether batches overlap (two weight versions)."""
    update: float = 0.0
    """Median time that an update takes from a stage's tasks, where batches overlap."""
    norm_latency: float = 0.0
    """Time that it waits for other ranks after the last stage has ended the batch."""
    reduction: float = 0.0
    """The same after the last replica of its own stage has, where stages do not wait for others."""
    begins: bool = True
    """Whether the pipeline was empty before the first batch."""
    drains: bool = True
    """Whether it was empty after the last one."""

    @property
    def splits_weight(self) -> bool:
        """Whether weight gradients were tasks of their own."""
        return self.weight_pieces > 0


def read_traces(folder: Path) -> TracedRun:
    """Read what --rrfp-trace wrote.

    Raises:
        UsageError: A rank is missing, or there is no complete training iteration.
    """
    try:
        ranks = read_rank(folder)
    except UsageError as error:
        raise UsageError(f"--from-trace: {error}") from None
    return traced_run(ranks, f"--from-trace {folder}")


def traced_run(ranks: Mapping[int, RankTrace], name: str) -> TracedRun:
    """What traces that have been read say of their run.

    Args:
        ranks: The traces, by rank.
        name: Of them, for messages.

    Raises:
        UsageError: A rank is missing, or there is no complete training iteration.
    """
    _check_complete(ranks, name)
    by_pipeline = sorted({tuple(rank.pipeline) for rank in ranks.values()})
    ordered = [ranks[number] for pipeline in by_pipeline for number in pipeline]
    shared = sorted(set.intersection(*(set(rank.batches) for rank in ordered)))
    delayed = [n for n in shared if any(n in rank.continuous for rank in ordered)]
    continuous = bool(delayed)
    if continuous:  # where a run also has synchronous iterations, they are of another kind
        shared = delayed
    owned = [rank.owned() for rank in ordered]
    tasks = [ran.task for tasks in owned for number in shared for ran in tasks.get(number, ())]
    if not tasks:
        raise UsageError(f"{name}: no training iteration is complete on all ranks")
    counts = Counter(task.kind for task in tasks)
    shape = _Shape(
        microbatches=1 + max(task.microbatch for task in tasks),
        chunks=1 + max(task.chunk for task in tasks),
        weight_pieces=round(counts[Kind.WEIGHT] / max(counts[Kind.BACKWARD], 1)),
        overhead=_task_overhead(ordered, shared),
    )
    messages = _messages(ordered, shape.overhead)
    hop = statistics.median(latency for *_, latency in messages) if messages else 0.0
    batches = []
    for number in shared:
        mine = [tasks.get(number, []) for tasks in owned]
        batch = _batch(ordered, mine, number, shape, continuous)
        if batch is None:  # cut off, or of another size
            continue
        _fill_hops(batch, ordered, messages, hop)
        batches.append(batch)
    if not batches:
        raise UsageError(f"{name}: no training iteration is complete on all ranks")
    settings = _settings(ordered)
    all_stages = settings.get("2BW clip", "exact") == "exact"
    update, waits = _updates(ordered, shared, owned, all_stages) if continuous else (0.0, 0.0)
    return TracedRun(
        stages=len(by_pipeline[0]),
        chunks=shape.chunks,
        replicas=len(by_pipeline),
        microbatches=shape.microbatches,
        weight_pieces=shape.weight_pieces,
        peak_live=max(rank.peak_live for rank in ordered),
        batches=batches,
        hop_latency=hop,
        task_overhead=shape.overhead,
        settings=settings,
        continuous=continuous,
        update=update,
        norm_latency=waits if all_stages else 0.0,
        reduction=0.0 if all_stages else waits,
        begins=all(rank.first_microbatch(batches[0].iteration) == 0 for rank in ordered),
        drains=all(batches[-1].iteration + 1 not in tasks for tasks in owned),
    )


@dataclass(frozen=True)
class _Shape:
    """What all batches of a run have in common."""

    microbatches: int
    chunks: int
    weight_pieces: int
    overhead: float


def _updates(
    ranks: list[RankTrace],
    numbers: list[int],
    owned: list[dict[int, list[RanTask]]],
    all_stages: bool,
) -> tuple[float, float]:
    """What ends a batch that others overlap.

    Returns:
        Median time that an update takes from the tasks of a stage, with what Megatron's loop does
        until the stage goes on; and median time from the last task on all ranks that it waits for
        to its end on the rank that is first, less its own pieces after that task.
    """
    taken, waited = [], []
    for number in numbers:
        lasts = [tasks[number][-1].ended for tasks in owned if tasks.get(number)]
        if len(lasts) < len(ranks):
            continue
        waits: dict[int, list[float]] = {}
        for rank in ranks:
            awaited = [
                end
                for other, end in zip(ranks, lasts, strict=True)
                if all_stages or other.stage == rank.stage
            ]
            last, group = max(awaited), 0 if all_stages else rank.stage
            start, end = rank.batches[number]
            pieces = [span for span in rank.updates if start - _SLACK <= span[0] <= end]
            loop = _loop_time(rank, number)
            computing = sum(stop - begun for begun, stop in pieces)
            after = sum(stop - max(begun, last) for begun, stop in pieces if stop > last)
            waits.setdefault(group, []).append(max(end - last - after, 0.0))
            if loop is not None:
                taken.append(computing + loop)
        # Others may have been in the middle of a task.
        waited += [min(found) for found in waits.values()]
    return (
        statistics.median(taken) if taken else 0.0,
        statistics.median(waited) if waited else 0.0,
    )


def _settings(ranks: list[RankTrace]) -> dict[str, Any]:
    """What the traces say of the run's settings; limits that differ are joined by commas."""
    settings = ranks[0].settings
    limits = [str(rank.live_limit) for rank in ranks]
    if len(set(limits)) > 1:
        settings["live limit"] = ",".join(limits[: len(ranks[0].pipeline)])
    return settings


def _check_complete(ranks: Mapping[int, RankTrace], name: str) -> None:
    """Refuse traces of which a rank's is missing.

    Raises:
        UsageError: One is.
    """
    world = next(iter(ranks.values())).world_size
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        names = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if missing[8:] else "")
        raise UsageError(
            f"{name}: there is no trace of rank {names} of {world}; "
            "trace a run that all ranks finish"
        )


def _loop_time(rank: RankTrace, number: int) -> float | None:
    """Time from the end of a batch to the next one on a rank, less evaluations between."""
    if number + 1 not in rank.batches:
        return None
    start, end = rank.batches[number][1], rank.batches[number + 1][0]
    evaluated = sum(stop - at for at, stop in rank.evaluations if start <= at and stop <= end)
    return max(end - start - evaluated, 0.0)


def _batch(
    ranks: list[RankTrace],
    owned: list[list[RanTask]],
    number: int,
    shape: _Shape,
    continuous: bool,
) -> TracedBatch | None:
    """The times of a batch; None if a task is missing.

    Where the time before a task differs from the mean overhead, the difference goes to the task.
    """
    chunks = shape.chunks
    size = (len(ranks) * chunks, shape.microbatches)
    tables: dict[Kind, Array] = {kind: np.zeros(size) for kind in _COMPUTED}
    ran_at_all = {kind: np.zeros(size, dtype=bool) for kind in _COMPUTED}
    ran_at_all[Kind.WEIGHT][:] = not shape.weight_pieces
    for index, (rank, tasks) in enumerate(zip(ranks, owned, strict=True)):
        for ran in tasks:
            kind, microbatch, chunk = ran.task
            # Several times where a hint cuts weight gradients into pieces.
            tables[kind][index * chunks + chunk, microbatch] += ran.ended - ran.started
            ran_at_all[kind][index * chunks + chunk, microbatch] = True
        for during in (number - 1, number):
            for owner, (kind, microbatch, chunk), gap in (
                rank.gaps(during) if (during in rank.tasks) else ()
            ):
                if owner == number:
                    row = index * chunks + chunk
                    tables[kind][row, microbatch] += gap - shape.overhead
    if not all(ran.all() for ran in ran_at_all.values()):
        return None
    for table in tables.values():
        np.maximum(table, 0, out=table)
    whole = tables[Kind.BACKWARD] + tables[Kind.WEIGHT]
    ended = max(tasks[-1].ended for tasks in owned)
    if continuous:
        before = [_last_of(rank, number - 1) for rank in ranks]
        started = max(end for end in before if end is not None) if any(before) else None
        if started is None:  # the first one: nothing to count from
            started = min(rank.batches[number][0] for rank in ranks if rank.stage == 0)
    else:
        started = min(rank.batches[number][0] for rank in ranks if rank.stage == 0)
    orders = [[ran.task for ran in tasks] for tasks in owned]
    times = TaskTimes(tables[Kind.FORWARD], whole, tables[Kind.WEIGHT])
    return TracedBatch(number, times, ended - started, orders, (np.zeros(size), np.zeros(size)))


def _last_of(rank: RankTrace, number: int) -> float | None:
    """When the last task of a batch ended on a rank; None where that was not traced."""
    if number not in rank.tasks:
        return None
    ends = [one.ended for one in rank.tasks[number] if rank.owner(number, one.task)[0] == number]
    return ends[-1] if ends else None


def _messages(ranks: list[RankTrace], overhead: float) -> list[tuple[int, RanTask, float]]:
    """Every message: index of the sending rank, the task that sent it, its latency.

    That is the time from the task's end to the arrival, and until the receiver begins with it where
    it waited, less the overhead of a task. Where it did not wait, the median of the latter counts.
    """
    arrived = {flow: at for rank in ranks for flow, at in rank.arrived.items()}
    noticed = {flow: delay for rank in ranks for flow, delay in rank.wake_delays.items()}
    usual = statistics.median(noticed.values()) if noticed else overhead
    return [
        (
            index,
            sender,
            max(arrived[flow] - sender.ended, 0.0) + max(noticed.get(flow, usual) - overhead, 0.0),
        )
        for index, rank in enumerate(ranks)
        for flow, sender in rank.sent.items()
        if flow in arrived
    ]


def _fill_hops(
    batch: TracedBatch,
    ranks: list[RankTrace],
    messages: list[tuple[int, RanTask, float]],
    hop: float,
) -> None:
    """Enter the latencies of one batch's messages."""
    chunks = len(batch.hops[0]) // len(ranks)
    for table in batch.hops:
        table[:] = hop
    for index, sender, latency in messages:
        rank = ranks[index]
        if sender.task.kind is Kind.WEIGHT:
            continue
        for during in (batch.iteration - 1, batch.iteration):
            if during not in rank.batches:
                continue
            start, end = rank.batches[during]
            if start <= sender.started <= end:
                owner, (kind, microbatch, chunk) = rank.owner(during, sender.task)
                if owner == batch.iteration:
                    batch.hops[kind][index * chunks + chunk, microbatch] = latency


def _task_overhead(ranks: list[RankTrace], numbers: list[int]) -> float:
    """Mean gap between neighbouring tasks that no wait stands between."""
    gaps = [gap for rank in ranks for number in numbers for *_, gap in rank.gaps(number)]
    return statistics.fmean(gaps) if gaps else 0.0
