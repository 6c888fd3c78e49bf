"""A simulated run as traces in the runtime's own format, one file per stage and replica.

A unit of simulated time is written as a millisecond. The same run gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.batch_statistics import (
    BatchStatistics,
    Load,
    MessageTime,
    Span,
    TaskSpan,
)
from megatron_ext.pipeline.clock_reading import ClockReading
from megatron_ext.pipeline.hints import Hint
from megatron_ext.pipeline.task import Direction, Header, Kind, Task
from megatron_ext.pipeline.trace import RankPlace, Trace
from megatron_ext.pipeline.trace_window import TraceWindow
from megatron_ext.simulate.outcome import Outcome, Recording
from megatron_ext.simulate.pipeline import Pipeline, Policy

_SECONDS = 1e-3  # of a unit of time
_INSIDE_S = 1e-8


def write_traces(folder: Path, pipeline: Pipeline, policy: Policy, outcome: Outcome) -> None:
    """Write what `outcome` recorded.

    Raises:
        UsageError: The folder cannot be made.
    """
    assert outcome.recordings is not None
    replicas = pipeline.replicas
    run = f"simulated {policy}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--trace {folder}: cannot make it ({error.strerror})") from None
    for index, recording in enumerate(outcome.recordings):
        replica, stage = divmod(index, pipeline.stages)
        ranks = [other * replicas + replica for other in range(pipeline.stages)]
        place = RankPlace(ranks[stage], pipeline.pipeline_ranks, stage, ranks)
        trace = Trace(TraceWindow(folder), place, timeout_s=0)
        trace.begin(ClockReading(run, "simulated", 0.0, 0.0), 0.0)
        for batch in batches(pipeline, recording, stage, hint=policy.hint_class):
            trace.write(batch)


def batches(
    pipeline: Pipeline, recording: Recording, stage: int, *, hint: type[Hint]
) -> Iterator[BatchStatistics]:
    """What the runtime would have noted of every batch of a stage.

    Under 2BW a stage runs tasks of two batches at a time; a batch then counts from the end of the
    one before.
    """
    size, chunks = pipeline.microbatches, pipeline.chunks
    frees, pieces = (Kind.WEIGHT, hint.weight_pieces) if hint.splits_weight else (Kind.BACKWARD, 1)
    waits = _waits(recording, pipeline.decision)
    ended = 0.0
    for number in range(pipeline.iterations):
        ran = [one for one in recording.tasks if one.task.microbatch // size == number]
        update = recording.updates[number]
        batch = BatchStatistics(forward_only=False, number=number, iteration=number + 1)
        batch.started, ended = ended * _SECONDS, max(ran[-1].ended, ended)
        batch.ended = ended * _SECONDS
        live = peak = freed = 0
        for one in ran:
            kind, microbatch, chunk = one.task
            task = Task(kind, microbatch % size, chunk)
            batch.tasks.append(TaskSpan(task, one.started * _SECONDS, one.ended * _SECONDS))
            freed += kind is frees  # weight gradients run in order, so only their number counts
            live += (kind is Kind.FORWARD) - (kind is frees and not freed % pieces)
            peak = max(peak, live)
            batch.loads.append(Load(one.ended * _SECONDS, 0, live))
            if header := _sent(pipeline, stage, task, number):
                # Inside the task, or the arrow would start from nothing.
                batch.sent.append(MessageTime(header, one.ended * _SECONDS - _INSIDE_S))
        batch.peak_live = peak
        for arrival in recording.arrived:
            if arrival.microbatch // size == number and arrival.chunk < chunks:
                direction = Direction(arrival.kind)
                header = Header(number, direction, arrival.microbatch % size, arrival.chunk, 0, ())
                batch.arrived.append(MessageTime(header, arrival.at * _SECONDS))
        batch.waits = [
            wait for wait in waits if batch.started <= wait.started and wait.ended <= batch.ended
        ]
        if update[1] > update[0]:
            batch.reductions.append(Span(update[0] * _SECONDS, update[1] * _SECONDS))
        ended = max(ended, update[1])
        yield batch


def _waits(recording: Recording, decision: float) -> list[Span]:
    """Gaps between what a stage did."""
    began = [(ran.started - decision, ran.ended) for ran in recording.tasks]
    spans = sorted([(0.0, 0.0), *began, *recording.updates])
    return [
        Span(before * _SECONDS, after * _SECONDS)
        for (_, before), (after, _) in pairwise(spans)
        if after - before > 1e-9 * max(after, 1)
    ]


def _sent(pipeline: Pipeline, stage: int, task: Task, batch: int) -> Header | None:
    """The header of the message that a task sends, None if it sends none."""
    if task.kind is Kind.WEIGHT:
        return None
    step = 1 if task.kind is Kind.FORWARD else -1
    virtual = task.chunk * pipeline.stages + stage + step
    if not 0 <= virtual < pipeline.virtual_stages:
        return None
    chunk = virtual // pipeline.stages
    return Header(batch, Direction(task.kind), task.microbatch, chunk, 0, ())
