"""Why the stages of a traced run waited, in the causes of the simulation."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ext.pipeline.hints import HINTS
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.simulate.outcome import Cause, RanTask
from megatron_ext.simulate.rank_trace import RankTrace

type Interval = tuple[float, float, Cause]
_SLACK = 2e-3  # of times that were rounded, in ms
_SEEN_MS = 0.1  # shorter decisions are counted, and not kept one by one


@dataclass
class StageTime:
    """Where the time of one rank went, in milliseconds."""

    busy: float = 0.0
    """In tasks."""
    by_cause: list[float] = field(default_factory=lambda: [0.0] * len(Cause))
    intervals: list[Interval] = field(default_factory=list)
    """The idle times that are long enough to be seen, in order."""

    @property
    def whole(self) -> float:
        """All time but that of evaluations."""
        return self.busy + sum(self.by_cause)

    @property
    def idle_share(self) -> float:
        """Part of it in which no task ran."""
        return 1 - self.busy / self.whole if self.whole else 0.0


def stage_times(ranks: Sequence[RankTrace]) -> list[StageTime]:
    """Where the time of every rank went, from the first batch's start to the last one's end.

    Every moment is in a task or idle by one cause; evaluations are left out.
    """
    spans = [span for rank in ranks for span in rank.batches.values()]
    if not spans:
        return [StageTime() for _ in ranks]
    begin, end = min(start for start, _ in spans), max(end for _, end in spans)
    ended: dict[int, float] = {}
    for rank in ranks:
        for iteration, tasks in rank.tasks.items():
            if tasks:
                ended[iteration] = max(ended.get(iteration, 0.0), tasks[-1].ended)
    return [_Sweep(rank, ended).run(begin, end) for rank in ranks]


class _Sweep:
    """Goes through what one rank did, in order of time."""

    def __init__(self, rank: RankTrace, ended: dict[int, float]) -> None:
        hint = HINTS.get(str(rank.settings.get("hint")))
        self._rank = rank
        self._ended = ended
        self._fixed_order = hint is not None and hint.fixed_order
        self._limit = rank.live_limit
        self._last_planned = rank.settings.get("iterations")
        self._state = _Progress(rank, rank.chunks)
        self._time = StageTime()
        self._waits, self._updates = sorted(rank.waits), sorted(rank.updates)

    def run(self, begin: float, end: float) -> StageTime:
        """The whole."""
        now = begin
        for iteration, (start, batch_end) in sorted(self._rank.batches.items()):
            if start > now:
                first = now == begin
                self._outside(now, start, None if first else self._previous(iteration))
            now = self._batch(iteration, max(start, now), batch_end)
        if end > now:
            self._outside(now, end, max(self._rank.batches))
        return self._time

    def _previous(self, iteration: int) -> int:
        return max(other for other in self._rank.batches if other < iteration)

    def _batch(self, iteration: int, start: float, end: float) -> float:
        """One batch; returns the time that is accounted for."""
        tasks = self._rank.tasks[iteration]
        if not tasks:
            self._add(start, end, Cause.UPDATE)
            return end
        state = self._state
        state.begin(iteration)
        last = tasks[-1].ended
        waits = _within(self._waits, start - _SLACK, last)
        updates = _within(self._updates, start - _SLACK, last)
        events: list[tuple[float, float, RanTask | Cause | None]] = [
            *((one.started, one.ended, one) for one in tasks),
            *((*span, None) for span in waits),
            *((*span, Cause.UPDATE) for span in updates),
        ]
        events.sort(key=lambda event: event[:2])
        following = self._following(events)
        now = start
        for (begun, finished, what), next_task in zip(events, following, strict=True):
            if begun > now:
                self._add(now, begun, Cause.AGREEMENT)
                now = begun
            finished = max(finished, now)
            if isinstance(what, RanTask):
                self._time.busy += finished - now
                state.completed(what.task)
            else:
                cause = self._cause(iteration, next_task) if what is None else what
                self._add(now, finished, cause)
            now = finished
        if end > now:
            self._outside(now, end, iteration)
        return max(now, end)

    @staticmethod
    def _following(
        events: list[tuple[float, float, RanTask | Cause | None]],
    ) -> list[RanTask | Cause | None]:
        """For every event what ran next: a task, or an update."""
        found: list[RanTask | Cause | None] = []
        latest: RanTask | Cause | None = None
        for *_, what in reversed(events):
            found.append(latest)
            if what is not None:
                latest = what
        return found[::-1]

    def _cause(self, iteration: int, next_task: RanTask | Cause | None) -> Cause:
        """Why a wait that begins now, and that `next_task` ends, came about."""
        state = self._state
        if state.empty:
            return Cause.FILL
        if isinstance(next_task, RanTask) and next_task.task.kind is Kind.FORWARD:
            return Cause.FORWARD
        if state.all_forwards_done and (not state.continuous or self._is_last(iteration)):
            return Cause.DRAIN
        if isinstance(next_task, Cause) or state.all_let_in_entered:
            return Cause.UPDATE
        limited = self._limit is not None and state.entered >= self._limit
        if self._fixed_order or not limited or state.awaits_forward:
            return Cause.BACKWARD
        return Cause.MEMORY

    def _is_last(self, iteration: int) -> bool:
        """Whether the pipeline drains at the end of this batch although it runs continuously."""
        if isinstance(self._last_planned, int):
            return iteration == self._last_planned
        return iteration == max(self._rank.batches)

    def _outside(self, start: float, end: float, iteration: int | None) -> None:
        """Time after the last task of a batch, or before the first batch."""
        for begun, finished in self._rank.evaluations:
            if begun < end and start < finished:
                if begun > start:
                    self._outside(start, begun, iteration)
                if finished < end:
                    self._outside(finished, end, iteration)
                return
        if iteration is None:
            self._add(start, end, Cause.FILL)
            return
        drained = start
        if iteration not in self._rank.continuous or self._is_last(iteration):
            drained = min(max(self._ended[iteration], start), end)
            self._add(start, drained, Cause.DRAIN)
        self._add(drained, end, Cause.UPDATE)

    def _add(self, start: float, end: float, cause: Cause) -> None:
        if end <= start:
            return
        self._time.by_cause[cause] += end - start
        if cause is not Cause.AGREEMENT or end - start > _SEEN_MS:
            self._time.intervals.append((start, end, cause))


class _Progress:
    """How far a rank is, in the arbiter's terms."""

    def __init__(self, rank: RankTrace, chunks: int) -> None:
        self._rank = rank
        self._chunks = chunks
        counts = Counter(one.task.kind for one in rank.all_tasks)
        self._held = Kind.WEIGHT if counts[Kind.WEIGHT] else Kind.BACKWARD
        # A weight gradient may be cut into pieces.
        pieces = round(counts[self._held] / max(counts[Kind.BACKWARD], 1))
        self._last_tasks = chunks * max(pieces, 1)
        """Tasks of a microbatch after which it is no longer held."""
        self._forwards: Counter[int] = Counter()
        self._forwards_of: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._entered: set[int] = set()
        self._begun = False
        self._size = self._batch = 0
        self.continuous = False
        """Whether the batch follows the one before it, or is followed, without a drain."""

    def begin(self, iteration: int) -> None:
        """The next batch to go through."""
        first = self._rank.first_microbatch(iteration)
        tasks = self._rank.tasks[iteration]
        given = int(self._rank.details[iteration].get("microbatches", 0))
        self._size = given or 1 + max(one.task.microbatch for one in tasks)
        self._batch = first // self._size
        self.continuous = iteration in self._rank.continuous
        if first == 0:
            self._forwards.clear()
            self._forwards_of.clear()
            self._left.clear()
            self._entered.clear()
            self._begun = False
        elif not self._begun:
            self._take_over(first)

    def _take_over(self, first: int) -> None:
        """The trace begins in the middle of a run: what is only ended in it had begun before."""
        self._begun = True
        ran = [one.task for tasks in self._rank.tasks.values() for one in tasks]
        seen = Counter(task.microbatch for task in ran if task.kind is Kind.FORWARD)
        ended = Counter(task.microbatch for task in ran if task.kind is self._held)
        for microbatch in range(first, first + self._size):
            before = self._chunks - seen[microbatch]
            self._forwards[microbatch // self._size] += before
        for microbatch in ended:
            if seen[microbatch] < self._chunks:
                self._entered.add(microbatch)
                self._forwards_of[microbatch] = self._chunks - seen[microbatch]
                self._left[microbatch] = self._last_tasks - ended[microbatch]

    def completed(self, task: Task) -> None:
        """Note that a task is done."""
        self._begun = True
        if task.kind is Kind.FORWARD:
            self._forwards[task.microbatch // self._size] += 1
            self._forwards_of[task.microbatch] += 1
            self._entered.add(task.microbatch)
        if task.kind is self._held:
            self._left[task.microbatch] += 1
            if self._left[task.microbatch] >= self._last_tasks:
                self._entered.discard(task.microbatch)
                del self._left[task.microbatch]

    @property
    def empty(self) -> bool:
        """Whether nothing has run since the pipeline was empty."""
        return not self._begun

    @property
    def entered(self) -> int:
        """Microbatches that have entered the stage and not left it."""
        return len(self._entered)

    @property
    def awaits_forward(self) -> bool:
        """Whether a microbatch that has entered has a forward on a later chunk to come."""
        return any(self._forwards_of[microbatch] < self._chunks for microbatch in self._entered)

    @property
    def all_forwards_done(self) -> bool:
        """Whether all forwards of the batch are done."""
        return self._forwards[self._batch] >= self._size * self._chunks

    @property
    def all_let_in_entered(self) -> bool:
        """Whether no forward may start before an update is done."""
        following = self._forwards[self._batch + 1] >= self._size * self._chunks
        return self.all_forwards_done and (not self.continuous or following)


def _within(
    spans: list[tuple[float, float]], begin: float, end: float
) -> list[tuple[float, float]]:
    """Those that start in a time."""
    return spans[bisect_left(spans, (begin,)) : bisect_left(spans, (end,))]
