"""`megatron-ext report`: the ranks' traces on one clock, and what is said of damaged ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli
from megatron_ext.pipeline.batch_statistics import BatchStatistics, MessageTime, TaskSpan
from megatron_ext.pipeline.clock import ClockReading
from megatron_ext.pipeline.task import Direction, Header, Kind, Task
from megatron_ext.pipeline.trace import RankPlace, Trace
from megatron_ext.pipeline.trace_window import TraceWindow
from tests.pipeline.test_trace import arrows, check_events, load

HEADER = Header(0, Direction.FORWARD, 0, 0, 1, (4,))
# How much more the clock of each rank shows than that of rank 0.
AHEAD_S = (0.0, 500.0, -90.0)


def write_traces(folder: Path, *, ranks: int = 3, run: str = "run") -> None:
    """Each rank gets microbatch 0 a second after the one before, and sends it half later."""
    for rank in range(ranks):
        start = 1000.0 + AHEAD_S[rank] + rank
        batch = BatchStatistics(False, iteration=1, started=start, ended=start + 0.9)
        batch.tasks = [TaskSpan(Task(Kind.FORWARD, 0), start, start + 0.6)]
        if rank > 0:
            batch.arrived = [MessageTime(HEADER, start - 0.1)]
        if rank < 2:
            batch.sent = [MessageTime(HEADER, start + 0.5)]
        place = RankPlace(rank=rank, world_size=3, stage=rank, pipeline=[0, 1, 2])
        trace = Trace(TraceWindow(folder), place, timeout_s=1)
        trace.begin(ClockReading(run, "host", AHEAD_S[rank], 20e-6 * rank))
        trace.write(batch)
        # The start of a file is a moment of this machine's clock; put it before the batch.
        path = folder / f"rank-{rank:05}.json"
        about, _ = load(path)
        old, new = (json.dumps(f"{x}")[1:-1] for x in (about["origin (us)"], (start - 0.5) * 1e6))
        path.write_text(path.read_text().replace(old, new, 1))


def report(*words: str | Path) -> int:
    return cli.main(["report", *(str(word) for word in words)])


def test_clocks_are_aligned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_traces(tmp_path / "trace")
    target = tmp_path / "joined.json"
    assert report(tmp_path / "trace", "--trace", target) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "of 3 ranks, clocks aligned to within 40 us" in output.out
    about, events = load(target)
    check_events(events)
    assert [rank["stage"] for rank in about["ranks"].values()] == [0, 1, 2]
    starts = {event["pid"]: event["ts"] for event in events if event.get("name") == "F 0"}
    assert starts == {0: 0.5e6, 1: 1.5e6, 2: 2.5e6}
    flows = arrows(events)
    assert len(flows) == 2
    for points in flows.values():
        assert [point["ph"] for point in points] == ["s", "t", "f"]
        times = [point["ts"] for point in points]
        assert times[1] - times[0] == pytest.approx(0.4e6, abs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["joined.json", "trace"]


def test_a_compressed_trace(tmp_path: Path) -> None:
    write_traces(tmp_path / "trace")
    assert report(tmp_path / "trace", "--trace", tmp_path / "joined.json.gz") == 0
    with gzip.open(tmp_path / "joined.json.gz", "rt") as file:
        check_events(json.load(file)["traceEvents"])


def _cut_off(folder: Path) -> None:
    path = folder / "rank-00001.json"
    path.write_text(path.read_text()[:-40])


def _remove(folder: Path) -> None:
    (folder / "rank-00001.json").unlink()


def _replace(folder: Path) -> None:
    (folder / "rank-00001.json").write_text('{"traceEvents": []}')


@pytest.mark.parametrize(
    ("damage", "warnings", "ranks"),
    [
        (_cut_off, [r"rank-00001.json is cut off"], 3),
        (_remove, [r"there is no trace of rank 1: it died before"], 2),
        (_replace, [r"rank-00001.json is left out", r"there is no trace of rank 1"], 2),
    ],
)
def test_damage_is_named_and_the_rest_is_used(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Any,
    warnings: list[str],
    ranks: int,
) -> None:
    write_traces(tmp_path)
    damage(tmp_path)
    assert report(tmp_path, "--trace", tmp_path / "joined.json") == 0
    output = capsys.readouterr()
    assert f"of {ranks} ranks" in output.out
    lines = output.err.splitlines()
    assert len(lines) == len(warnings)
    for line, expected in zip(lines, warnings, strict=True):
        assert line.startswith("megatron-ext report: warning: ")
        assert expected in line
    check_events(load(tmp_path / "joined.json")[1])


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-ext report: error: ")
    return line


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "joined.json"
    assert report(tmp_path) == 2
    assert "nothing to write: give -o FILE.html or --trace FILE" in refusal(capsys)
    assert report(tmp_path / "none", "--trace", target) == 2
    assert "none is no directory" in refusal(capsys)
    assert report(tmp_path, "--trace", target) == 2
    assert "holds no trace" in refusal(capsys)
    write_traces(tmp_path)
    assert report(tmp_path, "--trace", tmp_path / "no" / "joined.json") == 2
    assert "cannot write it (No such file or directory)" in refusal(capsys)
    write_traces(tmp_path, ranks=2, run="other")
    assert report(tmp_path, "--trace", target) == 2
    assert "holds traces of 2 runs" in refusal(capsys)
    assert not target.exists()
