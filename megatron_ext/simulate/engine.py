"""The event loop: real arbiters under a discrete-event clock.

An event is a tuple (time, who, what) in one heap: a task that ends, a message that arrives, or
updates that may run. Everything that happens at a time is known before a stage decides at that
time. A stage decides only if something changed for it, so the cost is that of the tasks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from megatron_ext.errors import PipelineError
from megatron_ext.pipeline.hints import Hint
from megatron_ext.pipeline.task import Direction, Kind, Task
from megatron_ext.simulate.batches import Batches
from megatron_ext.simulate.idle_times import IdleTimes
from megatron_ext.simulate.network import Hop
from megatron_ext.simulate.outcome import Cause, Delivered, Outcome, RanTask, Recording
from megatron_ext.simulate.pipeline import Pipeline, Policy
from megatron_ext.simulate.routes import Route, make_routes
from megatron_ext.simulate.task_times import Rows, TaskTimes
from megatron_ext.simulate.updates import Updates

FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
_DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD)
_UPDATE, _SENT = 3, 4  # further kinds of what keeps a stage busy
_REPORT_EVERY = 1 << 16  # tasks

MessageFactors = tuple[Rows, Rows]
"""Of activations and gradients, by the sending chunk: [rank * chunks + chunk][microbatch]."""

_Message = tuple[int, int, int]
"""Kind, microbatch over all iterations, and chunk of the task that needs it."""


def simulate(
    pipeline: Pipeline,
    times: TaskTimes,
    policy: Policy,
    hops: list[tuple[Hop, Hop]],
    *,
    message_factors: MessageFactors | None = None,
    blocking: bool = False,
    record: bool = False,
    on_progress: Callable[[int], object] = lambda _: None,
) -> Outcome:
    """Run all iterations.

    Args:
        pipeline: Its shape.
        times: Of every task.
        policy: Hint, limit, 2BW.
        hops: Of every stage, to the next one and to the one before.
        message_factors: On the latency of every message.
        blocking: Whether a stage that sends waits until the message has arrived.
        record: Whether to keep every task and message.
        on_progress: Called with the number of tasks done now and then.

    Raises:
        UsageError: The policy does not go with the pipeline.
        PipelineError: The hint lets the pipeline stall.
    """
    policy.check(pipeline)
    run = _Run(pipeline, times, policy, hops, message_factors, blocking=blocking, record=record)
    # The loop leaves no cycles behind, and looking for them would take most of its time.
    collects = gc.isenabled()
    gc.disable()
    try:
        run.loop(on_progress)
    finally:
        if collects:
            gc.enable()
    return run.outcome()


class _Run:
    """State of one simulation; `loop` is what its speed depends on."""

    def __init__(
        self,
        pipeline: Pipeline,
        times: TaskTimes,
        policy: Policy,
        hops: list[tuple[Hop, Hop]],
        message_factors: MessageFactors | None,
        *,
        blocking: bool,
        record: bool,
    ) -> None:
        ranks = pipeline.pipeline_ranks
        self.pipeline = pipeline
        self.hint: type[Hint] = policy.hint_class
        splits = self.hint.splits_weight
        pieces = self.hint.weight_pieces if splits else 1
        self.rows = times.rows(splits, pieces)
        self.tasks = pipeline.all_microbatches * pipeline.chunks * (2 + splits * pieces)
        self.blocking = blocking
        self.message_factors = message_factors
        self.routes = make_routes(pipeline, hops)
        self.batches = Batches(pipeline, policy)
        self.updates = Updates(pipeline, policy.clipping)
        self.arbiters = [self.batches.first(rank % pipeline.stages) for rank in range(ranks)]
        self.base = [0] * ranks  # the first microbatch of the arbiter
        self.ends = [arbiter.end for arbiter in self.arbiters]  # the first that is not let in
        self.forwards = [0] * ranks  # done, of the arbiter's batches
        self.peaks = [0] * ranks
        last_tasks = pipeline.microbatches * pipeline.chunks * pieces
        self.left = [last_tasks] * (ranks * pipeline.iterations)  # backwards, or weight gradients
        self.busy = [False] * ranks
        self.busy_time = [0.0] * ranks
        self.idle = IdleTimes(ranks)
        self.events: list[tuple[float, int, Any]] = []
        self.link_free = [0.0] * (2 * ranks)
        self.early: dict[int, list[_Message]] = {}  # of a batch that the stage has not begun
        self.due_updates: dict[int, list[int]] = {}
        self.recordings = [Recording() for _ in range(ranks)] if record else None
        self.now = 0.0

    def loop(self, on_progress: Callable[[int], object]) -> None:
        """Process events until there are none."""
        # Local names: attribute access would cost as much as the rest.
        pipeline, events, arbiters, base = self.pipeline, self.events, self.arbiters, self.base
        chunks, size, iterations = pipeline.chunks, pipeline.microbatches, pipeline.iterations
        ranks, decision, ends = pipeline.pipeline_ranks, pipeline.decision, self.ends
        busy, busy_time, left, forwards = self.busy, self.busy_time, self.left, self.forwards
        routes, rows, idle, since = self.routes, self.rows, self.idle, self.idle.since
        due_updates, recordings, fixed_order = (
            self.due_updates,
            self.recordings,
            self.hint.fixed_order,
        )
        drains_after = self.batches.drains_after * chunks
        last_kind = WEIGHT if self.hint.splits_weight else BACKWARD
        done, report_at, now = 0, _REPORT_EVERY, 0.0
        touched = list(range(ranks))  # stages for which something changed
        while True:
            for rank in touched:
                if busy[rank]:
                    continue
                if due_updates and rank in due_updates:
                    self._start_update(rank, now)
                    continue
                arbiter = arbiters[rank]
                task = arbiter.choose()
                if task is None:
                    if since[rank] < 0:
                        idle.begin(rank, now, arbiter, forwards[rank], drains_after, fixed_order)
                    continue
                if since[rank] >= 0:
                    idle.end(rank, now, task)
                kind, microbatch, chunk = task
                length = rows[kind][rank * chunks + chunk][base[rank] + microbatch]
                busy[rank] = True
                busy_time[rank] += length
                end = now + decision + length
                heappush(events, (end, rank, task))
                if recordings is not None:
                    ran = Task(kind, base[rank] + microbatch, chunk)
                    recordings[rank].tasks.append(RanTask(ran, now + decision, end))
            if not events:
                break
            now = events[0][0]
            touched = []
            while events and events[0][0] == now:
                _, rank, what = heappop(events)
                if rank < 0:
                    self._arrive(~rank, what, now, touched)
                    continue
                if rank >= ranks:
                    self._allow_updates(what, touched)
                    continue
                touched.append(rank)
                busy[rank] = False
                kind, microbatch, chunk = what
                if kind >= _UPDATE:
                    if kind == _UPDATE:
                        self._end_update(rank, microbatch)
                    continue
                arbiters[rank].completed(what)
                microbatch += base[rank]
                done += 1
                if kind is last_kind:
                    batch = microbatch // size
                    left[rank * iterations + batch] -= 1
                    if not left[rank * iterations + batch]:
                        self._end_batch(rank, batch, now)
                if kind is WEIGHT:
                    continue
                if kind is FORWARD:
                    forwards[rank] += 1
                route = routes[kind][rank * chunks + chunk]
                if route is None:
                    continue
                row = rank * chunks + chunk
                receiver, chunk, latency, transfer, _ = route
                if latency or transfer:
                    self._send(row, route, (kind, microbatch, chunk), now)
                    continue
                microbatch -= base[receiver]
                if recordings is None and microbatch < ends[receiver]:
                    arbiters[receiver].arrived(_DIRECTIONS[kind], microbatch, chunk)
                    touched.append(receiver)
                else:
                    self._arrive(receiver, (kind, microbatch + base[receiver], chunk), now, touched)
            if done >= report_at:
                on_progress(done)
                report_at = done + _REPORT_EVERY
        self.now = now

    def _send(self, row: int, route: Route, message: _Message, now: float) -> None:
        """Put a message of a chunk on its link, behind those that are on it."""
        receiver, _, latency, transfer, link = route
        rank = row // self.pipeline.chunks
        if self.message_factors is not None:
            latency *= self.message_factors[message[0]][row][message[1]]
        sent = self.link_free[link] = max(now, self.link_free[link]) + transfer
        heappush(self.events, (sent + latency, ~receiver, message))
        if self.blocking:
            self.busy[rank] = True
            self.idle.by_cause[rank][Cause.MESSAGE] += sent + latency - now
            heappush(self.events, (sent + latency, rank, (_SENT, 0, 0)))

    def _arrive(self, rank: int, message: _Message, now: float, touched: list[int]) -> None:
        """Hand a message to the arbiter, or keep it until its batch begins."""
        kind, microbatch, chunk = message
        if self.recordings is not None:
            self.recordings[rank].arrived.append(Delivered(kind, microbatch, chunk, now))
        local = microbatch - self.base[rank]
        if local < self.ends[rank]:
            self.arbiters[rank].arrived(_DIRECTIONS[kind], local, chunk)
            touched.append(rank)
        else:
            self.early.setdefault(rank, []).append(message)

    def _end_batch(self, rank: int, batch: int, now: float) -> None:
        """A stage has ended a batch; that may let updates run, there or on all stages."""
        allowed = self.updates.batch_ended(rank % self.pipeline.stages, batch, now)
        if allowed is not None:
            at, stages = allowed
            what = (batch, stages.start, stages.stop)
            heappush(self.events, (at, self.pipeline.pipeline_ranks, what))

    def _allow_updates(self, what: tuple[int, int, int], touched: list[int]) -> None:
        batch, first, last = what
        for start in range(0, self.pipeline.pipeline_ranks, self.pipeline.stages):
            for rank in range(start + first, start + last):
                self.due_updates.setdefault(rank, []).append(batch)
                touched.append(rank)

    def _start_update(self, rank: int, now: float) -> None:
        """Run the oldest update that is due: before any task, so that its weights are there."""
        due = self.due_updates[rank]
        batch = due.pop(0)
        if not due:
            del self.due_updates[rank]
        if self.idle.since[rank] >= 0:
            self.idle.end_by_update(rank, now, self.updates.ended[batch])
        length = self.pipeline.update
        self.busy[rank] = True
        self.idle.by_cause[rank][Cause.UPDATE] += length
        heappush(self.events, (now + length, rank, (_UPDATE, batch, 0)))
        if self.recordings is not None:
            self.recordings[rank].updates.append((now, now + length))

    def _end_update(self, rank: int, batch: int) -> None:
        """Go on with what the new weights admit."""
        before = self.arbiters[rank]
        after = self.batches.updated(before, batch)
        if after is None:
            return
        if after is not before:
            self.peaks[rank] = max(self.peaks[rank], before.peak_live)
            self.arbiters[rank] = after
            self.base[rank] += self.pipeline.microbatches
            self.forwards[rank] = 0
        self.ends[rank] = after.end
        for message in self.early.pop(rank, ()):
            kind, microbatch, chunk = message
            local = microbatch - self.base[rank]
            if local < after.end:
                after.arrived(_DIRECTIONS[kind], local, chunk)
            else:
                self.early.setdefault(rank, []).append(message)

    def outcome(self) -> Outcome:
        """The result; waits that go on end with the run."""
        pipeline, idle = self.pipeline, self.idle
        for entry, count in enumerate(self.left):
            if count:
                rank, batch = divmod(entry, pipeline.iterations)
                raise PipelineError(
                    f"the hint {self.hint.__name__} chose no task although some were ready: stage "
                    f"{rank % pipeline.stages} stalled in iteration {batch + 1}"
                )
        for rank, arbiter in enumerate(self.arbiters):
            self.peaks[rank] = max(self.peaks[rank], arbiter.peak_live)
            idle.by_cause[rank][Cause.AGREEMENT] += self.tasks * pipeline.decision
            if idle.since[rank] >= 0:
                idle.end_by_update(rank, self.now, self.updates.ended[-1])
        return Outcome(
            makespan=self.now,
            peak_live=self.peaks,
            busy=self.busy_time,
            idle=idle.by_cause,
            batch_ended=self.updates.ended,
            recordings=self.recordings,
        )
