"""The benchmark, small: its records and what must hold whatever the machine's noise."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import HINTS, Place
from megatron_ext.pipeline.task import Direction
from tests.training import REPOSITORY


@pytest.mark.multiprocess
def test_small_run(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = "--stages 3 --microbatches 6 --seeds 2 --sigmas 0 0.3 --forward-ms 2 --backward-ms 3"
    words += " --iterations 2"
    process = subprocess.run(
        [
            *[sys.executable, str(REPOSITORY / "scripts" / "bench_schedules.py")],
            *[*words.split(), "--json", str(out)],
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    results = json.loads(out.read_text())["results"]
    policies = {(r["hint"], r["live_limit"], r["iterations"], r["clip"]) for r in results}
    single = {("megatron-1f1b", "p", 1, None), ("bf", "p", 1, None), ("bf", "2p", 1, None)}
    several = {("megatron-1f1b", "p", 2, None), ("bfw", "2p", 2, "exact"), ("bfw", "2p", 2, "off")}
    assert single | several <= policies
    assert all(r["pipedream_2bw"] == (r["clip"] is not None) for r in results)
    assert len(results) == 2 * len(policies)
    for record in results:
        assert 0 < record["floor_ratio_min"] <= record["floor_ratio"] <= 1
        assert record["speedup_min"] <= record["speedup"] <= record["speedup_max"]
        assert record["makespan_s"] > record["floor_s"] > 6 * 0.005 * 0.5
        if record["hint"] == "megatron-1f1b":
            assert record["speedup"] == 1
            assert record["dispatch_us"] is None
        else:
            assert record["dispatch_us"] > 0
        assert 1 <= record["peak_live"] <= {"p": 3, "1.5p": 5, "2p": 6}[record["live_limit"]]


@pytest.mark.parametrize("hint", [name for name in HINTS if name != "1f1b"])
def test_a_decision_takes_at_most_ten_microseconds(hint: str) -> None:
    place = Place(stage=0, depth=8, microbatches=1000, live_limit=16)
    arbiter = Arbiter(place, HINTS[hint](place))
    times = []
    gradients = 0
    while not arbiter.finished:
        started = time.perf_counter()
        task = arbiter.choose()
        times.append(time.perf_counter() - started)
        if task is None:
            arbiter.arrived(Direction.BACKWARD, gradients)
            gradients += 1
        else:
            arbiter.completed(task)
    assert sorted(times)[len(times) // 2] <= 10e-6
