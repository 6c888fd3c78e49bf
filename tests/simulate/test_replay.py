"""Traces written by a simulation: valid, read back, predicted, and asked for more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli
from megatron_ext.simulate.traced_run import read_traces
from tests.pipeline.test_trace import arrows, check_events, load

JOB = (
    "--stages 4 --microbatches 12 --hop-latency 0.3 --iterations 3 --jitter lognormal:0.3 "
    "--task-overhead 0.05"
)


def trace(folder: Path, flags: str) -> Path:
    words = ["simulate", *JOB.split(), *flags.split(), "--trace", str(folder), "--json"]
    assert cli.main(words) == 0
    return folder


def asked(folder: Path, flags: str, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert cli.main(["simulate", "--from-trace", str(folder), *flags.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "flags",
    [
        "--hint bfw-depth --live-limit p --update 0.5",
        "--hint bf --live-limit 2p --replicas 2",
        "--hint bfw --live-limit 1.5p --pipedream-2bw --update 0.5",
        "--hint 1f1b --chunks 2",
    ],
)
def test_simulated_traces_are_traces(flags: str, tmp_path: Path) -> None:
    folder = trace(tmp_path / "trace", flags)
    events = []
    for path in sorted(folder.iterdir()):
        about, found = load(path)
        assert about["world size"] == len(list(folder.iterdir()))
        events += found
    check_events(events)
    assert {len(points) for points in arrows(events).values()} == {3}
    joined = tmp_path / "joined.json"
    assert cli.main(["report", str(folder), "--trace", str(joined)]) == 0
    check_events(load(joined)[1])


@pytest.mark.parametrize(
    "policy", ["bf 2p", "bfw-depth p", "bfw-pieces p", "b-priority 2p", "1f1b p", "fb p"]
)
def test_a_simulated_run_is_predicted_and_recognized(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hint, limit = policy.split()
    folder = trace(tmp_path, f"--hint {hint} --live-limit {limit} --update 0.5")
    found = asked(folder, "--hint bf", capsys)
    if hint in (
        "bf",
        "bfw-pieces",
        "b-priority",
        "1f1b",
    ):  # others may run in the order of one named earlier
        assert found["traced_policy"].split()[0] == hint
    assert found["task_overhead"] == pytest.approx(0.05, rel=0.02)
    assert found["hop_latency"] == pytest.approx(0.3, rel=0.02)
    assert max(map(abs, found["error"])) < 1e-4
    named = asked(folder, f"--hint bf --traced-hint {hint} --traced-limit {limit}", capsys)
    assert max(map(abs, named["error"])) < 1e-4


def test_what_was_measured(tmp_path: Path) -> None:
    run = read_traces(trace(tmp_path, "--hint bfw-depth --live-limit p --replicas 2 --chunks 2"))
    assert (run.stages, run.chunks, run.replicas, run.microbatches) == (4, 2, 2, 12)
    assert run.splits_weight
    assert [batch.iteration for batch in run.batches] == [1, 2, 3]
    assert run.batches[0].times.forward.shape == (16, 12)


def test_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trace(tmp_path, "--hint 1f1b --live-limit p")
    per_iteration = {
        one["policy"]: one["makespan_per_iteration"] for one in asked(folder, "", capsys)["what_if"]
    }
    assert per_iteration["bfw-depth 2p"] < per_iteration["1f1b p"]
    assert per_iteration["bfw-depth 2p 2BW"] < per_iteration["bfw-depth 2p"]

    def fixed(flags: str) -> float:
        (one,) = (
            one
            for one in asked(folder, f"--hint 1f1b {flags}", capsys)["what_if"]
            if one["policy"] == "1f1b p"
        )
        return float(one["makespan_per_iteration"])

    assert 1.6 < fixed("--microbatches 24") / fixed("") < 2
    assert fixed("--hop-latency 2") > 1.1 * fixed("")
    assert fixed("--layers 16 --split 2,4,4,6") > 1.1 * fixed("")
    advice = asked(folder, "--recommend --memory-gb 6 --live-gb 1", capsys)["recommended"]
    assert advice["peak_gb"] <= 6


def test_broken_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trace(tmp_path, "--hint bf")

    def refusal(flags: str = "") -> str:
        capsys.readouterr()
        assert cli.main(["simulate", "--from-trace", str(folder), *flags.split()]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    assert "--stages 5: the traced run has 4" in refusal("--stages 5")
    assert "the trace has no weight-gradient tasks" in refusal("--traced-hint bfw")
    assert "--split has 13 layers" in refusal("--layers 12 --split 3,3,3,4")
    assert "one number of layers for each of 4" in refusal("--layers 12 --split 6,6")
    path = folder / "rank-00002.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert "rank-00002.json is cut off" in refusal()
    path.unlink()
    assert "there is no trace of rank 2 of 4" in refusal()


def cut_out(folder: Path, first: int, last: int) -> None:
    """Leave what a trace of these iterations would hold."""
    for path in folder.iterdir():
        head, *lines = path.read_text().removesuffix("\n]}\n").split("\n")
        events = [json.loads(line.removesuffix(",")) for line in lines]
        spans = {
            int(event["name"].split()[1]): (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") == "batches"
        }
        begin, end = spans[first][0], spans[last][1]
        kept = [event for event in events if "ts" not in event or begin <= event["ts"] <= end]
        text = ",\n".join(json.dumps(event) for event in kept)
        path.write_text(f"{head}\n{text}\n]}}\n")


@pytest.mark.parametrize(
    ("flags", "usual"),
    [
        ("--hint bfw --live-limit 1.5p --update 0.5", 1e-3),
        ("--hint bf --live-limit 2p --update 0.5 --norm-latency 0.7", 1e-3),
        (
            "--hint bfw-depth --pipedream-2bw-clip stage --update 1 --replicas 2 --reduction 0.5",
            0.05,
        ),
        ("--hint bfw-room --live-limit 1.5p --update 0.5 --norm-latency 2 --chunks 2", 0.05),
    ],
)
def test_runs_that_do_not_drain_are_predicted(
    flags: str, usual: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trace(tmp_path, f"{flags} --pipedream-2bw --iterations 8 --seeds 1")
    found = asked(folder, "--hint bf", capsys)
    assert " 2BW" in found["traced_policy"]
    assert found["iterations"] == [1, 2, 3, 4, 5, 6, 7, 8]
    errors = sorted(map(abs, found["error"]))
    # A rounded time can decide between two tasks, and then orders differ for a while.
    assert errors[4] < usual
    assert errors[-1] < 0.06
    assert sum(found["predicted"]) == pytest.approx(sum(found["measured"]), rel=0.02)
    # A trace from the middle of a run: its first batch had begun before.
    cut_out(folder, 3, 6)
    found = asked(folder, "--hint bf", capsys)
    assert found["iterations"] == [4, 5, 6]
    assert sum(found["predicted"]) == pytest.approx(sum(found["measured"]), rel=0.05)
    per_iteration = {one["policy"]: one["makespan_per_iteration"] for one in found["what_if"]}
    assert per_iteration[found["traced_policy"]] < per_iteration["1f1b p"]


def test_a_run_that_does_not_drain_needs_a_known_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trace(tmp_path, "--hint bf --pipedream-2bw --live-limit 2p")
    for path in folder.iterdir():
        path.write_text(path.read_text().replace('"hint": "bf"', '"hint": "my:Own"'))
    capsys.readouterr()
    assert cli.main(["simulate", "--from-trace", str(folder)]) == 2
    assert "give --traced-hint and --traced-limit" in capsys.readouterr().err
    found = asked(folder, "--hint bf --traced-hint bf --traced-limit 2p", capsys)
    assert max(map(abs, found["error"])) < 1e-3
