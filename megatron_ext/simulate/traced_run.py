"""Measured times: what the traces of a short run say of its tasks, messages and waits.

Times are milliseconds on the first rank's clock.
"""

from __future__ import annotations

import statistics
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

_COMPUTED = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


@dataclass(frozen=True)
class TracedBatch:
    """One training iteration, as measured."""

    iteration: int
    times: TaskTimes
    makespan: float
    """From the first stage's start to the end of the last task on any stage."""
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
    splits_weight: bool
    peak_live: int
    batches: list[TracedBatch]
    hop_latency: float
    """Median time from the end of a task to the arrival of its message, and until a stage that
    waits for it begins, less the overhead of the task that it then runs."""
    task_overhead: float
    """Mean time between two tasks with no wait between them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the traces say of the run's settings, such as hint and live limit."""


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
    stages = len(by_pipeline[0])
    ordered = [ranks[number] for pipeline in by_pipeline for number in pipeline]
    complete = set.intersection(*(set(rank.batches) for rank in ordered))
    tasks = [task for rank in ordered for number in complete for task in rank.tasks[number]]
    if not tasks:
        raise UsageError(f"{name}: no training iteration is complete on all ranks")
    microbatches = 1 + max(task.task.microbatch for task in tasks)
    chunks = 1 + max(task.task.chunk for task in tasks)
    splits = any(task.task.kind is Kind.WEIGHT for task in tasks)
    overhead = _task_overhead(ordered, sorted(complete))
    messages = _messages(ordered, overhead)
    hop = statistics.median(latency for *_, latency in messages) if messages else 0.0
    batches = []
    for number in sorted(complete):
        batch = _batch(ordered, number, microbatches, chunks, splits, overhead)
        if batch is None:  # cut off, or of another size
            continue
        _fill_hops(batch, ordered, number, messages, hop)
        batches.append(batch)
    if not batches:
        raise UsageError(f"{name}: no training iteration is complete on all ranks")
    return TracedRun(
        stages=stages,
        chunks=chunks,
        replicas=len(by_pipeline),
        microbatches=microbatches,
        splits_weight=splits,
        peak_live=max(rank.peak_live for rank in ordered),
        batches=batches,
        hop_latency=hop,
        task_overhead=overhead,
        settings=_settings(ordered),
    )


def _settings(ranks: list[RankTrace]) -> dict[str, Any]:
    """What the traces say of the run's settings; limits that differ are joined by commas."""
    settings = dict(ranks[0].about.get("settings", {}))
    limits = [str(rank.about.get("settings", {}).get("live limit")) for rank in ranks]
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


def _batch(
    ranks: list[RankTrace],
    number: int,
    microbatches: int,
    chunks: int,
    splits: bool,
    overhead: float,
) -> TracedBatch | None:
    """The times of a batch; None if a task is missing.

    Where the time before a task differs from the mean overhead, the difference goes to the task.
    """
    shape = (len(ranks) * chunks, microbatches)
    tables: dict[Kind, Array] = {kind: np.full(shape, np.nan) for kind in _COMPUTED}
    if not splits:
        tables[Kind.WEIGHT][:] = 0
    orders = []
    for index, rank in enumerate(ranks):
        for ran in rank.tasks[number]:
            kind, microbatch, chunk = ran.task
            tables[kind][index * chunks + chunk, microbatch] = ran.ended - ran.started
        for (kind, microbatch, chunk), gap in rank.gaps(number):
            tables[kind][index * chunks + chunk, microbatch] += gap - overhead
        orders.append([ran.task for ran in rank.tasks[number]])
    if any(np.isnan(table).any() for table in tables.values()):
        return None
    for table in tables.values():
        np.maximum(table, 0, out=table)
    whole = tables[Kind.BACKWARD] + tables[Kind.WEIGHT]
    started = min(rank.batches[number][0] for rank in ranks if rank.stage == 0)
    ended = max(rank.tasks[number][-1].ended for rank in ranks)
    times = TaskTimes(tables[Kind.FORWARD], whole, tables[Kind.WEIGHT])
    hops = np.zeros(shape), np.zeros(shape)
    return TracedBatch(number, times, ended - started, orders, hops)


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
    number: int,
    messages: list[tuple[int, RanTask, float]],
    hop: float,
) -> None:
    """Enter the latencies of one batch's messages."""
    chunks = len(batch.hops[0]) // len(ranks)
    for table in batch.hops:
        table[:] = hop
    for index, sender, latency in messages:
        start, end = ranks[index].batches[number]
        kind, microbatch, chunk = sender.task
        if start <= sender.started <= end and kind is not Kind.WEIGHT:
            batch.hops[kind][index * chunks + chunk, microbatch] = latency


def _task_overhead(ranks: list[RankTrace], numbers: list[int]) -> float:
    """Mean gap between neighbouring tasks that no wait stands between."""
    gaps = [gap for rank in ranks for number in numbers for _, gap in rank.gaps(number)]
    return statistics.fmean(gaps) if gaps else 0.0
