"""What a job does after its step: a stand-in for srun ends as a training would."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.small_jobs import FAMILY_FILE, RRFP_FILE
from tests.training import REPOSITORY


@dataclass
class Outcome:
    """How a job ended."""

    code: int
    output: str
    requeued: bool


class Stage:
    """A folder with stand-ins for SLURM's commands and for the training's checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.requeues = folder / "requeues"
        programs = folder / "programs"
        programs.mkdir()
        self._program(programs, "scontrol", f'[[ $1 != requeue ]] || echo "$2" >>{self.requeues}')
        self._program(programs, "squeue", "echo $OTHERS")
        # What the step does: come to an iteration, tell SLURM's signal, end with a status.
        self._program(
            programs,
            "srun",
            '[[ -z $REACH ]] || echo "$REACH" >"$SAVED/latest_checkpointed_iteration.txt"\n'
            '[[ -z $SIGNAL ]] || kill -USR1 "$PPID"\n'
            "sleep 0.2\n"
            'exit "$STATUS"',
        )
        script = folder / "pretrain_gpt.py"
        script.touch()
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "REPO": str(REPOSITORY),
            "SCRIPT": str(script),
            "RUN_DIR": str(self.run),
            "SAVED": str(self.run / "checkpoints"),
            "DATA_PATH": "text",
            "TRAIN_ITERS": "100",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-16]",
            "SLURM_JOB_NUM_NODES": "16",
            "REACH": "",
            "SIGNAL": "",
            "STATUS": "0",
            "OTHERS": "",
        }

    def _program(self, programs: Path, name: str, text: str) -> None:
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)

    def job(self, file: Path = RRFP_FILE, **variables: str) -> Outcome:
        """Run a job file as SLURM would."""
        before = self._count()
        result = subprocess.run(
            ["bash", str(file)],
            env={**self.environment, **variables},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return Outcome(result.returncode, result.stdout, self._count() > before)

    def _count(self) -> int:
        return len(self.requeues.read_text().split()) if self.requeues.exists() else 0


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_finished_run_is_not_requeued_nor_started_again(stage: Stage) -> None:
    end = stage.job(REACH="100", SIGNAL="1")  # the signal came too late to matter
    assert (end.code, end.requeued) == (0, False)
    assert "finished: iteration 100 of 100" in end.output
    again = stage.job(STATUS="1")
    assert (again.code, again.requeued) == (0, False)
    assert "finished" in again.output
    longer = stage.job(REACH="200", EXTRA_FLAGS="--train-iters=200")
    assert "finished: iteration 200 of 200" in longer.output


def test_a_signal_requeues_with_the_checkpoint(stage: Stage) -> None:
    end = stage.job(REACH="40", SIGNAL="1")
    assert (end.code, end.requeued) == (0, True)
    assert "requeued: checkpoint of iteration 40 of 100" in end.output
    assert (stage.run / "stop").exists()
    stage.job(REACH="50", SLURM_RESTART_COUNT="1")
    assert not (stage.run / "stop").exists(), "the next start would end at once"


def test_the_number_of_an_array_s_task_is_requeued(stage: Stage) -> None:
    stage.job(REACH="40", SIGNAL="1", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2")
    assert stage.requeues.read_text().split() == ["5_2"]


def test_a_signal_without_progress_ends_the_job(stage: Stage) -> None:
    end = stage.job(SIGNAL="1")
    assert (end.code, end.requeued) == (2, False)
    assert "give more time (sbatch --time)" in end.output


def test_an_end_that_the_flags_asked_for_is_not_requeued(stage: Stage) -> None:
    end = stage.job(REACH="40")
    assert (end.code, end.requeued) == (0, False)
    assert "ended before the signal, with a checkpoint of iteration 40 of 100" in end.output


def test_crashes_do_not_requeue_for_ever(stage: Stage) -> None:
    first = stage.job(STATUS="1", REACH="40")
    assert first.requeued
    second = stage.job(STATUS="1", REACH="50")  # it went on in between
    assert second.requeued
    third = stage.job(STATUS="1")
    assert (third.code, third.requeued) == (1, False)
    assert "crash 2 in a row without a new checkpoint: not requeued" in third.output
    assert not stage.job(STATUS="1", REACH="60", CRASH_REQUEUES="0").requeued


@pytest.mark.parametrize(
    ("status", "line"),
    [(86, "stopped by --collapse-action stop"), (2, "wrong flag or environment"), (143, "outside")],
)
def test_what_a_restart_would_not_help_is_not_requeued(
    stage: Stage, status: int, line: str
) -> None:
    end = stage.job(STATUS=str(status), REACH="40", SIGNAL="1")
    assert (end.code, end.requeued) == (status, False)
    assert line in end.output


def test_two_jobs_do_not_share_a_folder(stage: Stage) -> None:
    stage.job(REACH="40", SIGNAL="1")
    other = stage.job(SLURM_JOB_ID="8", OTHERS="7")
    assert other.code == 2
    assert "in use by job 7" in other.output
    assert stage.job(SLURM_JOB_ID="8", REACH="100").code == 0  # job 7 has ended


def test_a_later_job_goes_on_with_the_same_wandb_run(stage: Stage) -> None:
    stage.job(REACH="40", WANDB_PROJECT="p", SLURM_CLUSTER_NAME="big")
    stage.job(REACH="50", WANDB_PROJECT="p", SLURM_JOB_ID="8")
    assert (stage.run / "wandb-run-id").read_text().split() == ["big-7"]


MISTAKES = [
    ({"DATA_PATH": ""}, "set DATA_PATH"),
    ({"LAYOUT": "pp16"}, "LAYOUT=pp16 is neither pp32 nor pp64"),
    ({"SLURM_JOB_NUM_NODES": "12"}, "TP 2 x PP 32 = 64 does not divide 12 nodes x 8 ranks = 96"),
    ({"SCRIPT": "nowhere.py"}, "nowhere.py: no such script; set MEGATRON"),
    ({"PYTHON": "no-python"}, "PYTHON=no-python: no such program"),
    ({"COLLAPSE_REFERENCE": "none.json"}, "COLLAPSE_REFERENCE=none.json: no such file"),
    ({"SETUP_FILE": "none.sh"}, "SETUP_FILE=none.sh: no such file"),
    ({"CONTAINER_IMAGE": "a", "CONTAINER_RUNTIME": "docker"}, "neither pyxis nor enroot"),
    ({"REPO": "/nowhere"}, "REPO=/nowhere is no checkout of megatron_ext"),
]


@pytest.mark.parametrize(("variables", "line"), MISTAKES, ids=[line for _, line in MISTAKES])
def test_a_mistake_is_one_line_before_anything_starts(
    stage: Stage, variables: dict[str, str], line: str
) -> None:
    end = stage.job(**variables)
    assert end.code == 2
    assert line in end.output
    assert len(end.output.splitlines()) == 1


def test_a_family_needs_a_size_per_task(stage: Stage) -> None:
    end = stage.job(FAMILY_FILE, SLURM_ARRAY_TASK_ID="4")
    assert end.code == 2
    assert "need sbatch --array=0-3" in end.output


@pytest.mark.parametrize("runtime", ["pyxis", "enroot"])
def test_containers_mount_what_the_job_needs(stage: Stage, runtime: str) -> None:
    end = stage.job(
        CONTAINER_IMAGE="image.sqsh",
        CONTAINER_RUNTIME=runtime,
        CONTAINER_MOUNTS="/data:/data",
        DRY_RUN="1",
    )
    words = shlex.split(end.output)
    before = words[: words.index("image.sqsh") + 1] if runtime == "enroot" else words
    for mount in (f"{REPOSITORY}:{REPOSITORY}", f"{stage.run}:{stage.run}", "/data:/data"):
        assert any(mount in word for word in before), mount
    assert any("image.sqsh" in word for word in words)
    assert words[words.index("--nodes") :][:2] == ["--nodes", "16"]


def test_the_layouts_fill_128_gpus(stage: Stage) -> None:
    for layout, pipeline in (("pp32", 32), ("pp64", 64)):
        words = shlex.split(stage.job(LAYOUT=layout, DRY_RUN="1").output)
        model = 2 * int(words[words.index("--pipeline-model-parallel-size") + 1])
        assert model == 2 * pipeline
        assert 128 % model == 0
