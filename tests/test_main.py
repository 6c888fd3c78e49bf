"""The entry point as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.training_log import parse_training_log
from tests.training import BASE_FLAGS, REPOSITORY, RRFP

ENTRY = [sys.executable, "-m", "megatron_ext"]
SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")


def run(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


def last_line(process: subprocess.CompletedProcess[str]) -> str:
    return process.stderr.strip().splitlines()[-1]


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a GPU")
def test_without_a_gpu_it_says_to_add_cpu() -> None:
    process = run(*ENTRY, SCRIPT, "--num-layers", "2")
    assert process.returncode == 2
    assert last_line(process) == (
        "megatron_ext: error: no CUDA device on this machine: "
        "add --cpu before the script to train on the CPU"
    )
    assert "Traceback" not in process.stderr


def test_a_missing_script() -> None:
    process = run(*ENTRY, "--cpu", "no/such/pretrain.py")
    assert process.returncode == 2
    assert last_line(process) == "megatron_ext: error: no such script: no/such/pretrain.py"


def test_help_lists_our_flags_beside_megatrons() -> None:
    process = run(*ENTRY, "--cpu", SCRIPT, "--help")
    assert process.returncode == 0
    assert "--pipeline-schedule {megatron,rrfp}" in process.stdout
    assert "--num-layers" in process.stdout


def test_a_script_sees_its_own_arguments_and_folder(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys, neighbour\nprint(__name__, sys.argv[1:], neighbour.WORD)\nraise SystemExit(7)"
    )
    (tmp_path / "neighbour.py").write_text("WORD = 'found'")
    process = run(*ENTRY, "--cpu", str(script), "--cpu", "a")
    assert process.stdout.splitlines()[-1] == "__main__ ['--cpu', 'a'] found"
    assert process.returncode == 7


def test_an_error_of_the_script_keeps_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("raise ValueError('broken\\nbadly')")
    process = run(*ENTRY, "--cpu", str(script))
    assert process.returncode == 1
    assert "mine.py" in process.stderr
    assert last_line(process) == "megatron_ext: error: rank 0: ValueError: broken"


def test_an_error_ends_helper_processes_too(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import multiprocessing, time\n"
        "context = multiprocessing.get_context('fork')\n"
        "context.Process(target=time.sleep, args=(1000,)).start()\n"
        "raise ValueError('broken')"
    )
    # The helper inherits the output: as long as it lives, its reader waits.
    process = run(*ENTRY, "--cpu", str(script), timeout_s=60)
    assert process.returncode == 1


def test_an_error_that_is_no_exception_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from torch.distributed.checkpoint import CheckpointException\n"
        "raise CheckpointException('write', {})"
    )
    process = run(*ENTRY, "--cpu", str(script))
    assert process.returncode == 1
    assert last_line(process).startswith("megatron_ext: error: rank 0: CheckpointException:")


def test_a_checkout_of_an_unsupported_megatron(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 11\nPATCH = 0\nPRE_RELEASE = ''\n")
    (tmp_path / "pretrain_gpt.py").write_text("print('ran')")
    process = run(*ENTRY, "--cpu", str(tmp_path / "pretrain_gpt.py"))
    assert process.returncode == 2
    assert "found Megatron 0.11.0, supported are >=0.17,<0.21" in last_line(process)


@pytest.mark.multiprocess
def test_torchrun_trains_through_the_executor(corpus: Path) -> None:
    process = run(
        sys.executable,
        *[
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "megatron_ext",
            "--cpu",
        ],
        *[SCRIPT, *BASE_FLAGS, *RRFP, "--pipeline-model-parallel-size", "2"],
        *["--data-path", str(corpus), "--data-cache-path", str(corpus.parent / "cache")],
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "readiness-driven pipeline: hint bfw-pieces, live_limit p" in process.stdout
    reports = parse_training_log(process.stdout.splitlines())
    assert [report.iteration for report in reports] == [1, 2, 3]
