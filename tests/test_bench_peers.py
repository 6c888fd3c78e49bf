"""The comparison with PyTorch's and Megatron's schedules, small: what no noise changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "bench_peers.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.multiprocess
def test_small_run(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    words = "--stages 2 --microbatches 4 --forward-ms 3 --backward-ms 6 --seeds 1"
    process = run(*words.split(), "--jitter-levels", "J0", "J3", "--json", str(out))
    assert process.returncode == 0, process.stderr
    results = json.loads(out.read_text())["results"]
    # Held at most by the first of 2 ranks, in microbatches of a whole stage: known by construction.
    held = {
        "Megatron 1F1B": 2,
        "Megatron interleaved 1F1B": 2.5,
        "PyTorch 1F1B": 2,
        "PyTorch Interleaved1F1B": 2.5,
        "PyTorch InterleavedZeroBubble": 2,
        "PyTorch ZBVZeroBubble": 2,
        "PyTorch DualPipeV": 2.5,
        "RRFP bfw-pieces at p": 2,
        "RRFP bfw-pieces at 2p": 4,
        "RRFP bfw-pieces at p, 2 chunks": 2,
    }
    policies = {record["policy"] for record in results}
    assert set(held) <= policies
    assert len(results) == 2 * len(policies)
    levels: dict[str, set[float]] = {"J0": set(), "J3": set()}
    for record in results:
        # Every schedule slept on every rank for as long as it was to, and for equally long.
        assert record["missed_s"] < 1e-9
        levels[record["jitter"]].add(round(record["floor_s"], 9))
        assert record["makespan_s"] > record["floor_s"]
        assert record["makespan_s"] > record["ideal_s"] >= record["floor_s"] - 1e-9
        if record["formula_s"]:  # PyTorch's own order, or the simulation's, takes textbook time
            assert record["ideal_s"] == pytest.approx(record["formula_s"])
        peak = held.get(record["policy"])
        if record["family"] == "RRFP":
            assert record["peak_live"] <= (peak or 2)
            assert record["ours_at_equal_memory"] == {}
        else:
            assert record["peak_live"] == peak
            assert len(record["ours_at_equal_memory"]) == record["chunks"]
            for ours, ratio in record["ours_at_equal_memory"].items():
                assert ours in policies
                assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    (quiet,), (late,) = levels["J0"], levels["J3"]
    assert quiet == pytest.approx(4 * 0.009)
    assert late > quiet  # delays were injected
    formulas = {record["policy"]: record["formula_s"] for record in results if record["formula_s"]}
    assert formulas["Megatron 1F1B"] == pytest.approx(5 * 0.009)
    assert formulas["PyTorch Interleaved1F1B"] == pytest.approx(4.5 * 0.009)

    table = run("--table", str(out))
    assert table.returncode == 0, table.stderr
    for name in policies:
        assert f"| {name} |" in table.stdout
    assert "RRFP is behind nowhere" in table.stdout or " is behind " in table.stdout


def test_mistakes_are_named(tmp_path: Path) -> None:
    odd = run("--stages", "4", "--microbatches", "9")
    assert odd.returncode == 2
    assert "--microbatches 9: schedules with two chunks per rank need" in odd.stderr
    missing = run("--table", str(tmp_path / "none.json"))
    assert missing.returncode == 2
    (line,) = (line for line in missing.stderr.splitlines() if "rror" in line)
    assert line.startswith("bench_peers.py: error: --table")
