"""The check for GPUs, tried on the CPU: every step runs for real, at tiny size."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
# All but those that start four processes, and nixl, which has tests of its own.
ONE_MINUTE = (
    *("environment", "pp1", "pp1-2bw", "pp2-gloo", "weight-gradients", "transformer-engine"),
    *("one-task-queued", "muon-2bw"),
)


def run(*words: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.run(
        [str(SCRIPTS / "gpu_check.sh"), *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_dry_run(tmp_path: Path) -> None:
    found = tmp_path / "gpu.json"
    process = run(
        *["--dry-run-cpu", "--json", str(found), "--out", str(tmp_path / "out")],
        *["--limit-s", "540", "--only", *ONE_MINUTE],
        timeout_s=590,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(found.read_text())
    checks = {check["name"]: check for check in report["checks"]}
    assert set(checks) == set(ONE_MINUTE)
    skipped = {"transformer-engine"}
    for name, check in checks.items():
        assert check["status"] == ("skipped" if name in skipped else "ok"), check
    assert checks["pp2-gloo"]["figures"]["identical"] is True
    assert checks["pp2-gloo"]["figures"]["loss_difference"] == 0
    assert checks["one-task-queued"]["figures"]["tasks"] == 2 * 3 * 8 * 3  # F, B and W
    assert report["dry_run_cpu"] is True
    assert "dry run" in process.stdout
    assert process.stdout.rstrip().splitlines()[-1].startswith("└")  # the table comes last
    rows = {row["run"]: row for row in report["throughput"]}
    assert rows["PP2, RRFP, gloo"]["last_loss"] == rows["PP2, Megatron 1F1B"]["last_loss"]

    table = subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_check.py"), "--table", str(found)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert table.returncode == 0, table.stderr
    assert "| pp2-gloo | ok | losses, norms and weights identical" in table.stdout


def test_a_check_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    found = tmp_path / "gpu.json"
    process = run(
        *["--dry-run-cpu", "--limit-s", "1", "--json", str(found), "--out", str(tmp_path / "out")],
    )
    assert process.returncode == 1, process.stdout + process.stderr
    checks = {check["name"]: check for check in json.loads(found.read_text())["checks"]}
    assert checks["environment"]["status"] == "ok"
    assert checks["muon-2bw"]["status"] == "FAILED"
    assert "the time is up (--limit-s)" in checks["muon-2bw"]["detail"]


@pytest.mark.skipif(
    bool(importlib.util.find_spec("torch")) and __import__("torch").cuda.is_available(),
    reason="there is a GPU",
)
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    process = run("--out", str(tmp_path))
    assert process.returncode == 2
    (line,) = (line for line in process.stderr.splitlines() if "error" in line)
    assert "CUDA" in line
    assert "--dry-run-cpu" in line


def test_depths_of_a_device_that_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from gpu_check_queue import queue_depths

    def write(chosen_us: list[float], ends_us: list[float]) -> None:
        def event(name: str, category: str, start: float, end: float, **about: int) -> Any:
            head = {"ph": "X", "name": name, "cat": category, "args": about}
            return {**head, "ts": start, "dur": end - start}

        events = [event("iteration 1", "batches", 0, 100_000)]
        for number, (at, end) in enumerate(zip(chosen_us, ends_us, strict=True)):
            events.append(event(f"F {number}", "tasks", at, at + 10, microbatch=number))
            events.append(event(f"F {number}", "device", end - 900, end, microbatch=number))
        (tmp_path / "rank-00000.json").write_text(json.dumps({"traceEvents": events}))

    write([0, 100, 1000, 2000], [1000, 2000, 3000, 4000])
    assert queue_depths(tmp_path, device=True) == [0, 1, 1, 1]
    write([0, 100, 200, 300], [1000, 2000, 3000, 4000])
    assert queue_depths(tmp_path, device=True) == [0, 1, 2, 3]
    assert queue_depths(tmp_path, device=False) == [0, 0, 0, 0]


def test_the_script_alone_names_the_makefile_that_a_wheel_lacks() -> None:
    process = subprocess.run(
        [sys.executable, str(SCRIPTS / "pretrain_gpt.py"), "--num-layers", "2"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.rstrip().splitlines()[-1].startswith("pretrain_gpt.py: error: this")
    assert "python -m megatron_ext" in process.stderr
