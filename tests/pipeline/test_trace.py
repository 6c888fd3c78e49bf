"""Traces: valid for the viewers, complete, cheap, and there when a run dies."""

from __future__ import annotations

import itertools
import json
import shlex
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.batch_statistics import (
    BatchStatistics,
    Load,
    MessageTime,
    Span,
    TaskSpan,
)
from megatron_ext.pipeline.clock import ClockReading
from megatron_ext.pipeline.task import Direction, Header, Kind, Task
from megatron_ext.pipeline.trace import RankPlace, Trace, batch_events, label, rank_names
from megatron_ext.pipeline.trace_window import TraceWindow
from tests.training import RRFP, Disturbance, train, train_well

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD
Event = dict[str, Any]


def load(path: Path) -> tuple[dict[str, Any], list[Event]]:
    """What a trace file says of itself, and its events."""
    document = json.loads(path.read_text())
    return document["otherData"], document["traceEvents"]


def check_events(events: list[Event]) -> None:
    """What the trace event format asks for, and what the viewers silently drop otherwise."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set()
    threads: dict[int, int] = {}
    for event in events:
        assert event["ph"] in "XMCistf", event
        assert isinstance(event["pid"], int)
        assert threads.setdefault(event["tid"], event["pid"]) == event["pid"]
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        elif event["ph"] in "stf":
            int(event["id"], 16)
    for track, spans in slices.items():
        assert track in named
        spans.sort()
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert end <= begin + 0.002, "slices of one track overlap"
    for event in events:
        if event["ph"] in "stf":
            spans = slices[event["pid"], event["tid"]]
            inside = [begin <= event["ts"] <= end for begin, end in spans]
            assert any(inside), f"an arrow that binds to nothing: {event}"


def arrows(events: list[Event]) -> dict[str, list[Event]]:
    """The points of every arrow, in order of time."""
    points = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            points[event["id"]].append(event)
    return {flow: sorted(found, key=lambda event: event["ts"]) for flow, found in points.items()}


def slice_names(events: list[Event], category: str) -> list[str]:
    return [event["name"] for event in events if event.get("cat") == category]


def test_windows(tmp_path: Path) -> None:
    window = TraceWindow.parse(f"{tmp_path}:5-7")
    assert window == TraceWindow(tmp_path, 5, 7)
    assert [window.holds(n) for n in (4, 5, 7, 8)] == [False, True, True, False]
    assert TraceWindow.parse("out/trace").holds(10**6)
    assert str(window) == f"{tmp_path}:5-7"
    assert TraceWindow.parse("C:odd/name:1-1").folder == Path("C:odd/name")


@pytest.mark.parametrize("text", ["", "out:7-3", "out:0-3", "out:5", "out:5-", "out:"])
def test_other_windows_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is neither DIR nor DIR:FIRST-LAST|has no iteration"):
        TraceWindow.parse(text)


def test_labels() -> None:
    assert label(Task(FORWARD, 3)) == "F 3"
    assert label(Task(BACKWARD, 12, 1)) == "B 12.1"


# Real trainings.

PP2 = shlex.split("--pipeline-model-parallel-size 2")


@pytest.mark.multiprocess
def test_traces_of_a_training(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    flags = "--train-iters 4 --eval-interval 2 --eval-iters 1 --rrfp-hint bf --rrfp-live-limit 3"
    window = ["--rrfp-trace", f"{folder}:2-3"]
    traced = train_well(corpus, 2, [*PP2, *RRFP, *flags.split(), *window])
    plain = train_well(corpus, 2, [*PP2, *RRFP, *flags.split()])
    assert [record["steps"] for record in traced] == [record["steps"] for record in plain]

    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.json", "rank-00001.json"]
    joined: list[Event] = []
    waits, seen = 0, set[int]()
    for stage in (0, 1):
        about, events = load(folder / f"rank-{stage:05}.json")
        assert about["format"] == "megatron_ext trace 1"
        assert (about["rank"], about["stage"], about["pipeline"]) == (stage, stage, [0, 1])
        assert about["clock uncertainty (us)"] == 0  # one machine, one clock
        assert about["settings"]["hint"] == "bf"
        assert about["settings"]["live limit"] == 3 - stage  # it falls along the pipeline
        assert about["command"][0].endswith("pretrain_gpt.py")
        assert "--rrfp-trace" in about["command"]
        assert about["memory"] == "peak resident memory of the process"
        check_events(events)
        (first, *_) = (event["args"] for event in events if event.get("cat") == "batches")
        assert (first["first microbatch"], first["microbatches"], first["weight lag"]) == (0, 8, 0)
        assert first["decisions"] == 16
        assert 0 < first["dispatch median (us)"] <= first["dispatch p99 (us)"]
        assert 50e6 < first["memory (bytes)"] < 50e9
        batches = slice_names(events, "batches")
        assert batches == ["iteration 2", "evaluation after iteration 2", "iteration 3"]
        names = [event["name"] for event in events if event["ph"] == "M"]
        assert names.count("process_name") == 1
        tasks = slice_names(events, "tasks")
        for number in range(8):
            assert tasks.count(f"F {number}") == 3
            assert tasks.count(f"B {number}") == 2
        waits += tasks.count("wait")
        assert tasks.count("reduce gradients") == 2
        live = [event["args"]["microbatches"] for event in events if event["name"] == "live"]
        assert max(live) == (3 if stage == 0 else 1)
        ready = [event["args"]["tasks"] for event in events if event["name"] == "ready"]
        seen |= set(ready)
        joined += events
    assert waits
    assert {0, 1} <= seen
    flows = arrows(joined)
    assert len(flows) == 3 * 8 + 2 * 8
    for first, step, last in flows.values():
        assert (first["ph"], step["ph"], last["ph"]) == ("s", "t", "f")
        assert first["pid"] != step["pid"] == last["pid"]


@pytest.mark.multiprocess
def test_a_run_that_dies_leaves_its_trace(corpus: Path, tmp_path: Path) -> None:
    flags = [*PP2, *RRFP, "--rrfp-timeout", "5", "--rrfp-trace", str(tmp_path)]
    killed = Disturbance(rank=1, kill=True)
    ranks, _ = train(corpus, 2, flags, disturbance=killed, timeout_s=60)
    assert [rank.exit_code for rank in ranks] == [1, -signal.SIGKILL]

    _, events = load(tmp_path / "rank-00000.json")
    check_events(events)
    assert slice_names(events, "batches") == ["iteration 1", "iteration 2"]
    (mark,) = (event for event in events if event["ph"] == "i")
    assert "stage 0 of 2 (rank 0), iteration 2: lost stage 1 (rank 1)" in mark["args"]["error"]
    last = max((event for event in events if event.get("cat") == "tasks"), key=lambda e: e["ts"])
    assert last["name"] == "wait"

    _, events = load(tmp_path / "rank-00001.json")
    assert slice_names(events, "batches") == ["iteration 1"]


@pytest.mark.multiprocess
def test_sigterm_leaves_a_trace_too(corpus: Path, tmp_path: Path) -> None:
    flags = [*PP2, *RRFP, "--rrfp-trace", f"{tmp_path}:2-2"]
    stalled = Disturbance(rank=1, stall_s=3, terminate_others=True)
    ranks, _ = train(corpus, 2, flags, disturbance=stalled, timeout_s=60)
    assert ranks[0].exit_code == -signal.SIGTERM
    _, events = load(tmp_path / "rank-00000.json")
    check_events(events)
    (mark,) = (event for event in events if event["ph"] == "i")
    assert "ended by SIGTERM while waiting for" in mark["args"]["error"]
    last = max((event for event in events if event.get("cat") == "tasks"), key=lambda e: e["ts"])
    assert last["name"] == "wait"
    assert last["dur"] > 0.5e6


@pytest.mark.multiprocess
def test_a_trace_of_megatron_own_schedule_is_refused(corpus: Path, tmp_path: Path) -> None:
    ranks, _ = train(corpus, 2, [*PP2, "--rrfp-trace", str(tmp_path)])
    for rank in ranks:
        assert rank.exit_code == 2
        assert "--rrfp-trace traces the readiness-driven pipeline only" in rank.error_line


# Without processes.

PLACE = RankPlace(rank=1, world_size=3, stage=1, pipeline=[0, 1, 2])
ALONE = RankPlace(rank=0, world_size=1, stage=0, pipeline=[0])
CLOCK = ClockReading("run", "host", 0.0, 0.0)


def make_batch(microbatches: int = 64, iteration: int = 1) -> BatchStatistics:
    """A batch of a middle stage: every task with two messages, a wait and a decision."""
    batch = BatchStatistics(False, iteration=iteration, started=100.0, peak_live=2)
    now = batch.started
    for number in range(microbatches):
        for direction in Direction:
            header = Header(0, direction, number, 0, 1, (64, 1, 64))
            batch.loads.append(Load(now, number % 2, number % 3))
            batch.waits.append(Span(now, now + 0.001))
            batch.arrived.append(MessageTime(header, now + 0.001))
            batch.tasks.append(TaskSpan(Task(Kind(direction), number), now + 0.001, now + 0.005))
            batch.sent.append(MessageTime(header, now + 0.004))
            now += 0.006
    batch.ended = now
    return batch


def test_messages_that_arrive_together_stay_apart() -> None:
    batch = make_batch(4)
    same = batch.arrived[0].at
    batch.arrived = [MessageTime(header, same) for header, _ in batch.arrived]
    check_events([json.loads(line) for line in [*rank_names(PLACE), *batch_events(batch, PLACE)]])


def test_an_error_text_may_hold_anything() -> None:
    text = 'lost "stage 1"\n\\ and \u00e9'
    events = [json.loads(line) for line in batch_events(make_batch(1), PLACE, text)]
    assert [event["args"]["error"] for event in events if event["ph"] == "i"] == [text]


def test_a_batch_that_never_began_has_no_events() -> None:
    assert batch_events(BatchStatistics(False), PLACE, "died before") == []


def test_writing_a_batch_takes_little(tmp_path: Path) -> None:
    """64 microbatches with 4 ms forwards and 8 ms backwards are 0.8 s; 2% of that are 16 ms."""
    trace = Trace(TraceWindow(tmp_path), ALONE, timeout_s=1)
    trace.begin(CLOCK)
    batch, times = make_batch(64), []
    for _ in range(5):
        started = time.perf_counter()
        trace.write(batch)
        times.append(time.perf_counter() - started)
    assert min(times) < 16e-3
    _, events = load(tmp_path / "rank-00000.json")
    assert slice_names(events, "batches") == ["iteration 1"] * 5


def test_recording_a_task_takes_microseconds() -> None:
    batch = BatchStatistics(False)
    task = Task(FORWARD, 0)
    started = time.perf_counter()
    for _ in range(1000):
        with batch.running(task):
            pass
        with batch.timed(batch.waits):
            pass
    assert (time.perf_counter() - started) / 1000 < 50e-6


def test_an_earlier_trace_is_kept_and_a_full_disk_is_no_reason_to_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        trace = Trace(TraceWindow(tmp_path), ALONE, timeout_s=1)
        trace.begin(CLOCK)
    assert (tmp_path / "rank-00000.json.previous").exists()
    (tmp_path / "rank-00000.json").unlink()
    trace.write(make_batch(1))
    trace.write(make_batch(1))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "warning: --rrfp-trace: cannot write" in lines[0]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--rrfp-trace .*file/trace: cannot make"):
        Trace(TraceWindow(tmp_path / "file" / "trace"), PLACE, timeout_s=1)
