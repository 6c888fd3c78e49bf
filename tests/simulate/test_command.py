"""The command: results, the same bytes for the same seed, and errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext import cli

EXAMPLE = (
    "--stages 4 --microbatches 16 --forward 1 --backward 2 --weight-share 0.5 --hint bfw "
    "--live-limit p --jitter lognormal:0.3 --hop-latency 0.3 --iterations 3 --pipedream-2bw "
    "--seed 0 --seeds 3"
)


def simulated(capsys: pytest.CaptureFixture[str], flags: str) -> Any:
    assert cli.main(["simulate", *flags.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], flags: str) -> str:
    assert cli.main(["simulate", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err.removeprefix("megatron-ext simulate: error: ")


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, EXAMPLE)
    assert found["floor"] < found["makespan"]
    assert found["floor_ratio"] == pytest.approx(found["floor"] / found["makespan"], rel=0.01)
    assert found["speedup_vs_1f1b"] > 1.1
    assert found["peak_live"] == 4
    flushed = simulated(capsys, EXAMPLE.replace("--pipedream-2bw", ""))
    assert flushed["makespan"] > found["makespan"]
    assert flushed["floor"] == found["floor"]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    outputs = []
    for name in ("a", "b"):
        words = [*EXAMPLE.split(), "--json", "--trace", str(tmp_path / name)]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_ext.cli", "simulate", *words],
            capture_output=True,
            check=True,
            timeout=60,
        )
        traces = [path.read_bytes() for path in sorted((tmp_path / name).iterdir())]
        outputs.append((done.stdout, traces))
    assert outputs[0] == outputs[1]
    assert len(outputs[0][1]) == 4


def test_another_seed_gives_another_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(capsys, EXAMPLE) != simulated(capsys, EXAMPLE.replace("--seed 0", "--seed 5"))


def test_no_jitter_is_the_textbook(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "--stages 4 --microbatches 10 --hint 1f1b --no-baseline")
    assert found["makespan"] == pytest.approx((10 + 3) * 3, rel=1e-9)
    assert found["speedup_vs_1f1b"] is None
    assert found["floor"] == 30


def write(path: Path, **tables: Any) -> Path:
    path.write_text(json.dumps(tables))
    return path


def test_explicit_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward, backward, weight = np.random.default_rng(0).uniform(1, 2, (3, 3, 5)).tolist()
    split = write(tmp_path / "split.json", F=forward, B=backward, W=weight)
    whole = write(tmp_path / "whole.json", F=forward, B=np.add(backward, weight).tolist())
    results = [
        simulated(capsys, f"--durations {path} --hint bf --live-limit 5")["makespan"]
        for path in (split, whole)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    one = write(tmp_path / "one.json", F=[[1, 2, 3]], B=[[4, 5, 6]])
    found = simulated(capsys, f"--durations {one} --hint bfw-depth")
    assert found["makespan"] == found["floor"] == 21
    chunks = write(tmp_path / "chunks.json", F=[[1, 1]] * 4, B=[[2, 2]] * 4)
    assert simulated(capsys, f"--durations {chunks} --chunks 2 --hint 1f1b")["makespan"] == 15


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("nonsense", "is no JSON"),
        ("[1]", 'no object with "F", "B"'),
        ('{"F": [[1]]}', 'no object with "F", "B"'),
        ('{"F": [[1]], "B": [[1, 2]]}', "differ in stages or microbatches"),
        ('{"F": [[1], [1, 2]], "B": [[1], [1]]}', "no table [stage][microbatch] of numbers"),
        ('{"F": [[1, -2]], "B": [[1, 2]]}', '"F"[0][1] is -2'),
        ('{"F": [["x"]], "B": [[1]]}', "no table [stage][microbatch] of numbers"),
    ],
)
def test_other_files_are_refused(
    document: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    path.write_text(document)
    error = refusal(capsys, f"--durations {path}")
    assert error.startswith(f"--durations {path}")
    assert reason in error


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        ("--forward -1", "--forward -1: a time is finite and not negative"),
        ("--backward nan", "--backward nan"),
        ("--update -2", "--update -2"),
        ("--hop-latency -0.1", "--hop-latency -0.1"),
        ("--bandwidth 0", "--bandwidth 0"),
        ("--stages 0", "--stages 0"),
        ("--chunks 3 --layers 20", "--layers: 20 layers do not reach for 24 model chunks"),
        ("--stages 4 --layers 1,2,3", "--layers: 3 numbers for 4 model chunks"),
        ("--stages 4 --forward 1,2", "--forward: 2 times for 4 stages"),
        ("--live-limit 0", "--live-limit 0"),
        ("--live-limit 1,2", "--live-limit 1,2: 2 limits for 8 stages"),
        ("--hint gpipe --live-limit p", "--live-limit p: gpipe holds 64 microbatches"),
        ("--hint 1f1b --chunks 2 --live-limit p", "--live-limit p: 1f1b holds 12"),
        ("--hint nope", "--hint: no schedule 'nope'; there are bf"),
        ("--hint gpipe --pipedream-2bw", "--pipedream-2bw does not go with --hint gpipe"),
        (
            "--hint 1f1b --pipedream-2bw --microbatches 4",
            "--pipedream-2bw does not go with --hint 1f1b and 4 microbatches",
        ),
        ("--hint 1f1b --chunks 2 --microbatches 9", "--hint 1f1b: the interleaved 1f1b order"),
        ("--seeds 0", "--seeds 0"),
        ("--seed -1", "--seed -1"),
        ("--weight-share 1.5", "--weight-share 1.5"),
        ("--recommend", "--recommend needs --memory-gb"),
        ("--recommend --memory-gb 3", "--recommend --memory-gb needs --live-gb"),
        ("--recommend --memory-gb 3 --live-gb 2 --other-gb 2", "--memory-gb 3: --other-gb 2"),
        ("--memory-gb 3", "--memory-gb needs --recommend"),
        ("--live-gb -1", "--live-gb -1"),
        ("--split 1,2", "--split needs --from-trace"),
        ("--from-trace x --jitter J1", "--jitter and --from-trace"),
        ("--from-trace /no/such", "--from-trace: /no/such is no directory"),
        ("--durations x --stages 3", "--stages and --durations"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, flags).startswith(start)


def test_unequal_layers_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    even = simulated(capsys, "--stages 4 --layers 16 --hint bf --live-gb 2 --other-gb 3")
    assert even["floor"] == 64 * 3
    assert even["peak_gb"] == 3 + 2 * even["peak_live"]
    uneven = simulated(capsys, "--stages 4 --layers 18")
    assert uneven["floor"] == pytest.approx(64 * 3 * 5 / 4.5)
    two_versions = simulated(
        capsys, "--stages 4 --hint bf --iterations 2 --pipedream-2bw --live-gb 2 --weights-gb 1"
    )
    assert two_versions["peak_gb"] == 1 + 2 * two_versions["peak_live"]


def test_the_recommendation_fits_and_is_the_best_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = "--stages 4 --microbatches 24 --jitter lognormal:0.3 --live-gb 2 --other-gb 3"
    tight, roomy = (
        simulated(capsys, f"{job} --recommend --memory-gb {memory}") for memory in (11, 19)
    )
    assert tight["peak_gb"] <= 11 < roomy["peak_gb"] <= 19
    assert roomy["makespan"] < tight["makespan"]
    assert tight["flags"].startswith("--pipeline-schedule rrfp --rrfp-hint bfw")
    plain = simulated(capsys, f"{job} --hint bfw-depth --live-limit p")
    assert tight["makespan"] <= plain["makespan"] * 1.005
    chunks = "--stages 4 --chunks 2 --microbatches 8 --recommend --memory-gb 20 --live-gb 2"
    assert simulated(capsys, chunks)["peak_gb"] <= 20
    nothing = "--stages 4 --weight-share 0 --recommend --memory-gb 8 --live-gb 2"
    assert simulated(capsys, nothing)["flags"] == "--pipeline-schedule megatron"


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys\n"
        "from megatron_ext import cli\n"
        "cli.main(['simulate', '--stages', '2', '--json'])\n"
        "heavy = {'torch', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True)
