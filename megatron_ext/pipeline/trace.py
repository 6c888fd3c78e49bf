"""A rank's trace: what ran, waited and travelled when, in the Chrome trace event format.

Every rank writes ``rank-00000.json`` and so on. A file is brought up to date after every traced
batch, and after the one that fails; in between it is always a whole JSON document, so that a run
that is killed leaves a trace that opens. One event stands on each line, times are microseconds of
the rank's own clock, and ``otherData`` tells how that clock stands to the first rank's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ext import __version__
from megatron_ext.errors import UsageError
from megatron_ext.pipeline.batch_statistics import BatchStatistics, MessageTime, Span, consumer
from megatron_ext.pipeline.clock_reading import ClockReading
from megatron_ext.pipeline.run_facts import RunFacts
from megatron_ext.pipeline.task import Direction, Header, Task
from megatron_ext.pipeline.trace_window import FILE_NAME, FORMAT, TraceWindow

_FOOT = b"\n]}\n"

# Tracks of a rank, in the order shown. Threads get numbers that no two ranks share, because
# viewers name threads by number alone.
_TRACKS = ("batches", "tasks", "activations in", "gradients in", "device")
_BATCHES, _TASKS, _DEVICE = 0, 1, 4
_ARRIVALS = {Direction.FORWARD: 2, Direction.BACKWARD: 3}

# An arrival is a moment; an arrow needs something with a length to point to.
_ARRIVAL_US = 5.0
_INSIDE_US = 0.001


type _Waiting = dict[tuple[int, Task], str]
"""Arrows of messages that no task has used yet, by batch and task."""


@dataclass(frozen=True)
class RankPlace:
    """Which rank writes a trace, and where it stands."""

    rank: int
    world_size: int
    stage: int
    pipeline: list[int]
    """The ranks of this rank's pipeline, stage by stage."""


class Trace:
    """Writes the trace of one rank.

    Args:
        window: Where to, and which iterations.
        place: This rank.
        timeout_s: How long to wait for the other ranks when clocks are compared, which happens
            on all ranks together before the first traced batch.
        facts: What to say of the run besides what happens.

    Raises:
        UsageError: The folder cannot be made.
    """

    def __init__(
        self,
        window: TraceWindow,
        place: RankPlace,
        *,
        timeout_s: float,
        facts: RunFacts | None = None,
    ) -> None:
        self._window = window
        self._facts = facts or RunFacts()
        self._place = place
        self._timeout_s = timeout_s
        self._path = window.folder / FILE_NAME.format(place.rank)
        self._clock: ClockReading | None = None
        self._broken = False
        self._waiting: _Waiting = {}
        try:
            window.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--rrfp-trace {window}: cannot make {window.folder} ({error.strerror}); "
                "name a directory that can be written to"
            ) from None

    def holds(self, statistics: BatchStatistics) -> bool:
        """Whether this batch is traced."""
        return self._window.holds(statistics.iteration)

    @contextlib.contextmanager
    def batch(self, statistics: BatchStatistics) -> Iterator[None]:
        """Write what the body, which runs one batch, put into `statistics`, also if it fails."""
        if not self._window.holds(statistics.iteration):
            yield
            return
        if self._clock is None:
            # Not above: simulations write traces too, and have no PyTorch to wait for.
            from megatron_ext.pipeline.clock import compare_clocks

            place = self._place
            self.begin(compare_clocks(place.rank, place.world_size, timeout_s=self._timeout_s))
        try:
            yield
        except BaseException as error:
            self.write(statistics, str(error) or repr(error))
            raise
        self.write(statistics)

    def write(self, statistics: BatchStatistics, failure: str | None = None) -> None:
        """Add a batch, as far as it got, to the file.

        Args:
            statistics: The batch; one outside the window is left out.
            failure: Why it ended early.
        """
        if self._broken or self._clock is None or not self._window.holds(statistics.iteration):
            return
        memory = self._facts.memory
        lines = batch_events(
            statistics,
            self._place,
            failure,
            memory_bytes=memory.read() if memory else None,
            waiting=self._waiting,
        )
        with self._writing(), self._path.open("r+b") as file:
            file.seek(-len(_FOOT), os.SEEK_END)
            file.write("".join(f",\n{line}" for line in lines).encode() + _FOOT)

    def begin(self, clock: ClockReading, origin_s: float | None = None) -> None:
        """Start the file; that of an earlier run is kept beside it.

        Args:
            clock: How this rank's clock stands to the first rank's.
            origin_s: The clock's time at which a joined trace begins; now if None.
        """
        origin_s = time.perf_counter() if origin_s is None else origin_s
        self._clock, place = clock, self._place
        about = {
            "format": FORMAT,
            "megatron_ext": __version__,
            "run": clock.run,
            "rank": place.rank,
            "world size": place.world_size,
            "stage": place.stage,
            "pipeline": place.pipeline,
            "host": clock.host,
            "clock offset (us)": clock.offset_s * 1e6,
            "clock uncertainty (us)": clock.uncertainty_s * 1e6,
            "origin (us)": origin_s * 1e6,
            "command": list(self._facts.command),
            "settings": dict(self._facts.settings),
        }
        if self._facts.memory is not None:
            about["memory"] = self._facts.memory.name
        head = json.dumps({"otherData": about, "displayTimeUnit": "ms"})[:-1]
        lines = ",\n".join(rank_names(place))
        with self._writing():
            if self._path.exists():
                self._path.replace(self._path.with_name(self._path.name + ".previous"))
            self._path.write_bytes(f'{head}, "traceEvents": [\n{lines}'.encode() + _FOOT)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A trace that cannot be written is no reason to end a training."""
        try:
            yield
        except OSError as error:
            self._broken = True
            print(
                f"megatron_ext: warning: --rrfp-trace: cannot write {self._path} "
                f"({error.strerror}); rank {self._place.rank} is not traced any more",
                file=sys.stderr,
                flush=True,
            )


def batch_events(
    statistics: BatchStatistics,
    place: RankPlace,
    failure: str | None = None,
    *,
    memory_bytes: int | None = None,
    waiting: _Waiting | None = None,
) -> list[str]:
    """The trace events of one batch, each as JSON in one line.

    Args:
        statistics: What happened; a batch that has not ended ends now, waiting.
        place: The rank on which it happened.
        failure: Why the batch ended early, for a mark at its end.
        memory_bytes: The rank's memory after it.
        waiting: Messages that arrived in earlier batches and were not used there; is updated.
    """
    if math.isnan(statistics.started):
        return []
    events = _Events(place)
    waits, end = list(statistics.waits), statistics.ended
    if math.isnan(end):
        end = time.perf_counter()
        done = [span.ended for span in statistics.tasks] + [span.ended for span in waits]
        waits.append(Span(max(done, default=statistics.started), end))
    end = max([end, *(span.ended for span in statistics.reductions)])
    about = json.dumps(_about_batch(statistics, memory_bytes), separators=(",", ":"))
    kind = "evaluation after iteration" if statistics.forward_only else "iteration"
    events.slice(_BATCHES, f"{kind} {statistics.iteration}", statistics.started, end, about)
    for task, started, ended in statistics.tasks:
        about = f'{{"microbatch":{task.microbatch},"chunk":{task.chunk}}}'
        events.slice(_TASKS, label(task), started, ended, about)
    if statistics.device_tasks:
        events.lines += _track_names(place, _DEVICE)
    for task, started, ended in statistics.device_tasks:
        about = f'{{"microbatch":{task.microbatch},"chunk":{task.chunk}}}'
        events.slice(_DEVICE, label(task), started, ended, about)
    for started, ended in waits:
        events.slice(_TASKS, "wait", started, ended)
    for started, ended in statistics.reductions:
        events.slice(_TASKS, "reduce gradients", started, ended)
    for started, ended in statistics.updates:
        events.slice(_TASKS, "update", started, ended)
    _add_messages(events, statistics, {} if waiting is None else waiting)
    # A rank on which nothing was ever ready leaves its decisions to another rank of its group.
    if any(ready for _, ready, _ in statistics.loads):
        _add_counter(events, "ready", "tasks", [(at, ready) for at, ready, _ in statistics.loads])
        events.counter("ready", "tasks", end, 0)
    _add_counter(events, "live", "microbatches", [(at, live) for at, _, live in statistics.loads])
    events.counter("live", "microbatches", end, 0)
    if failure is not None:
        events.mark(failure, end)
    return events.lines


def rank_names(place: RankPlace) -> Iterator[str]:
    """Events that name a rank and its tracks, and say in which order to show them."""
    yield _about(place, "process_name", {"name": f"stage {place.stage} (rank {place.rank})"})
    order = place.pipeline[0] * len(place.pipeline) + place.stage
    yield _about(place, "process_sort_index", {"sort_index": order})
    for track in range(_DEVICE):
        yield from _track_names(place, track)


def _track_names(place: RankPlace, track: int) -> Iterator[str]:
    yield _about(place, "thread_name", {"name": _TRACKS[track]}, track)
    yield _about(place, "thread_sort_index", {"sort_index": track}, track)


def _about(place: RankPlace, name: str, about: dict[str, Any], track: int = 0) -> str:
    thread = _thread(place, track)
    return json.dumps({"ph": "M", "name": name, "pid": place.rank, "tid": thread, "args": about})


def label(task: Task) -> str:
    """Short name of a task: F 3, or F 3.1 on the second model chunk."""
    kind, microbatch, chunk = task
    return f"{kind.name[0]} {microbatch}" + (f".{chunk}" if chunk else "")


def _about_batch(statistics: BatchStatistics, memory_bytes: int | None) -> dict[str, Any]:
    """What a batch says of itself besides its tasks."""
    about: dict[str, Any] = {
        "batch": statistics.number,
        "microbatches live at most": statistics.peak_live,
    }
    if statistics.microbatches:
        about["first microbatch"] = statistics.first_microbatch
        about["microbatches"] = statistics.microbatches
        about["weight lag"] = statistics.weight_lag
    for name, times in (
        ("dispatch", statistics.dispatch_s),
        ("agreement", statistics.agreement_s),
    ):
        if times:
            ordered = sorted(times)
            about["decisions"] = len(ordered)
            about[f"{name} median (us)"] = round(ordered[len(ordered) // 2] * 1e6, 1)
            about[f"{name} p99 (us)"] = round(ordered[(len(ordered) * 99) // 100] * 1e6, 1)
            about[f"{name} total (us)"] = round(sum(ordered) * 1e6, 1)
    if memory_bytes is not None:
        about["memory (bytes)"] = memory_bytes
    return about


def _add_messages(events: _Events, statistics: BatchStatistics, waiting: _Waiting) -> None:
    """An arrow per message: from the task that sent it, over its arrival, to the task it is for."""
    for header, at in statistics.sent:
        events.arrow("s", _TASKS, at * 1e6, events.flow(header, receiver=False))
    last: dict[Direction, MessageTime] = {}
    for message in sorted(statistics.arrived, key=lambda message: message.at, reverse=True):
        header, at = message
        track, flow = _ARRIVALS[header.direction], events.flow(header, receiver=True)
        following = last.get(header.direction)
        last[header.direction] = message
        length = min(_ARRIVAL_US, (following.at - at) * 1e6 if following else _ARRIVAL_US)
        name = f"{header.direction.payload} {header.microbatch}"
        events.slice(track, name, at, at + length * 1e-6)
        events.arrow("t", track, at * 1e6 + min(_INSIDE_US, length / 2), flow)
        waiting[header.batch, consumer(header)] = flow
    for task, started, ended in statistics.tasks:
        # Without a drain, a message may be used in a later batch than it arrived in.
        if used := waiting.pop((statistics.number, task), None):
            inside = min(_INSIDE_US, (ended - started) * 1e6 / 2)
            events.arrow("f", _TASKS, started * 1e6 + inside, used)


def _add_counter(events: _Events, name: str, unit: str, values: list[tuple[float, int]]) -> None:
    """A counter where it changes."""
    before = -1
    for at, value in values:
        if value != before:
            events.counter(name, unit, at, value)
            before = value


class _Events:
    """Trace events of one rank as lines of JSON.

    Written by hand where it can be: `json.dumps` takes several times as long, and this runs
    between the iterations of a training.
    """

    def __init__(self, place: RankPlace) -> None:
        self.lines: list[str] = []
        self._place = place
        self._on = [f'"pid":{place.rank},"tid":{_thread(place, i)}' for i in range(len(_TRACKS))]

    def slice(self, track: int, name: str, started: float, ended: float, about: str = "{}") -> None:
        """A bar on a track; `about` is JSON."""
        begin, length = started * 1e6, max(ended - started, 0) * 1e6
        self.lines.append(
            f'{{"ph":"X","name":"{name}","cat":"{_TRACKS[track]}",{self._on[track]},'
            f'"ts":{begin:.3f},"dur":{length:.3f},"args":{about}}}'
        )

    def arrow(self, phase: str, track: int, at_us: float, flow: str) -> None:
        """One point of an arrow: its start ("s"), a step ("t") or its end ("f")."""
        binding = ',"bp":"e"' if phase == "f" else ""
        self.lines.append(
            f'{{"ph":"{phase}","name":"message","cat":"message","id":"{flow}",{self._on[track]},'
            f'"ts":{at_us:.3f}{binding}}}'
        )

    def counter(self, name: str, unit: str, at: float, value: int) -> None:
        """A value from now on."""
        self.lines.append(
            f'{{"ph":"C","name":"{name}",{self._on[_TASKS]},"ts":{at * 1e6:.3f},'
            f'"args":{{"{unit}":{value}}}}}'
        )

    def mark(self, text: str, at: float) -> None:
        """A mark across the whole rank, for what ended it."""
        self.lines.append(
            f'{{"ph":"i","s":"p","name":"failed","cat":"failed",{self._on[_TASKS]},'
            f'"ts":{at * 1e6:.3f},"args":{json.dumps({"error": text})}}}'
        )

    def flow(self, header: Header, *, receiver: bool) -> str:
        """The same 64-bit number, in hexadecimal, at both ends of a message and nowhere else."""
        place = self._place
        stage = place.stage
        if not receiver:
            step = 1 if header.direction is Direction.FORWARD else -1
            stage = (stage + step) % len(place.pipeline)
        key = (
            f"{place.pipeline[0]} {stage} {header.batch} {int(header.direction)} "
            f"{header.microbatch} {header.chunk}"
        )
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def _thread(place: RankPlace, track: int) -> int:
    return (place.rank + 1) * len(_TRACKS) + track
