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
from megatron_ext.pipeline.run_facts import RunFacts
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
        facts = RunFacts(
            settings=_settings(
                pipeline, policy, policy.limits(pipeline.stages, pipeline.chunks)[stage]
            )
        )
        trace = Trace(TraceWindow(folder), place, timeout_s=0, facts=facts)
        trace.begin(ClockReading(run, "simulated", 0.0, 0.0), 0.0)
        for batch in batches(pipeline, policy, recording, stage):
            trace.write(batch)


def _settings(pipeline: Pipeline, policy: Policy, limit: int) -> dict[str, str | int]:
    """What the runtime would say of its settings."""
    settings: dict[str, str | int] = {
        "hint": policy.hint,
        "live limit": limit,
        "chunks": pipeline.chunks,
        "tensor parallel": pipeline.tensor_parallel,
    }
    return settings | ({"2BW clip": str(policy.clipping)} if policy.pipedream_2bw else {})


def batches(
    pipeline: Pipeline, policy: Policy, recording: Recording, stage: int
) -> Iterator[BatchStatistics]:
    """What the runtime would have noted of every batch of a stage.

    Under 2BW a stage runs tasks of two batches at a time. All batches are then one run, whose
    microbatches are numbered on, and a batch lasts from the update before it to its own.
    """
    size, chunks, continuous = pipeline.microbatches, pipeline.chunks, policy.pipedream_2bw
    hint = policy.hint_class
    frees, pieces = (Kind.WEIGHT, hint.weight_pieces) if hint.splits_weight else (Kind.BACKWARD, 1)
    waits = _waits(recording, pipeline.decision)
    ended, live, done, freed = 0.0, 0, 0, 0
    for iteration in range(pipeline.iterations):
        update = recording.updates[iteration]
        batch = BatchStatistics(
            forward_only=False,
            number=0 if continuous else iteration,
            iteration=iteration + 1,
            first_microbatch=iteration * size if continuous else 0,
            microbatches=size,
            weight_lag=1 if continuous and iteration else 0,
        )
        begun = ended
        is_last = iteration + 1 == pipeline.iterations
        batch.started = begun * _SECONDS
        while done < len(recording.tasks):
            one = recording.tasks[done]
            if not is_last and one.started >= update[1] and one.ended > update[1]:
                break
            kind, microbatch, chunk = one.task
            task = Task(kind, microbatch if continuous else microbatch % size, chunk)
            batch.tasks.append(TaskSpan(task, one.started * _SECONDS, one.ended * _SECONDS))
            freed += kind is frees  # weight gradients run in order, so only their number counts
            live += (kind is Kind.FORWARD) - (kind is frees and not freed % pieces)
            batch.peak_live = max(batch.peak_live, live)
            batch.loads.append(Load(one.ended * _SECONDS, 0, live))
            if header := _sent(pipeline, stage, task, batch.number):
                # Inside the task, or the arrow would start from nothing.
                batch.sent.append(MessageTime(header, one.ended * _SECONDS - _INSIDE_S))
            ended = max(ended, one.ended)
            done += 1
        is_update = update[1] > update[0]
        if continuous:
            ended = max(ended, update[1])
        batch.ended = ended * _SECONDS
        ended = max(ended, update[1])
        for arrival in recording.arrived:
            number = arrival.microbatch // size
            if continuous:
                is_here = begun <= arrival.at and (arrival.at < ended or is_last)
            else:
                is_here = number == iteration
            if is_here and arrival.chunk < chunks:
                microbatch = arrival.microbatch if continuous else arrival.microbatch % size
                direction = Direction(arrival.kind)
                header = Header(batch.number, direction, microbatch, arrival.chunk, 0, ())
                batch.arrived.append(MessageTime(header, arrival.at * _SECONDS))
        batch.waits = [
            wait for wait in waits if batch.started <= wait.started and wait.ended <= batch.ended
        ]
        if is_update:
            spans = batch.updates if continuous else batch.reductions
            spans.append(Span(update[0] * _SECONDS, update[1] * _SECONDS))
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
