"""Every supported Megatron computes with our hooks, and with our patches, what it does alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext import hooks
from megatron_ext.arguments import COLLAPSE_EXIT_CODE
from megatron_ext.collapse.curve import Curve
from megatron_ext.collapse.curve_file import write_curve
from tests.compatibility.sources import VERSIONS, sources
from tests.compatibility.trainings import run_in
from tests.training import REPOSITORY

pytestmark = [pytest.mark.compatibility, pytest.mark.multiprocess, pytest.mark.timeout(1300)]

RRFP = "--pipeline-schedule rrfp"
FULL = bool(os.environ.get("MEGATRON_EXT_EVERY_MEGATRON"))
"""Whether what usually runs on one version only runs on all; `scripts/test_compatibility.sh`."""


def apply_patches(megatron: Path, *more: str) -> None:
    script = REPOSITORY / "scripts" / "apply_patches.sh"
    done = subprocess.run(
        [script, "--megatron", megatron, *more], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def check_same(training: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for one, two in zip(training, other, strict=True):
        for record in (one, two):
            assert record["exit_code"] == 0, record["output"]
        assert len(one["steps"]) == 3
        assert one["steps"] == two["steps"]
        assert one["weights"] == two["weights"]


def check_used(megatron: Path, training: list[dict[str, Any]]) -> None:
    assert all(Path(record["megatron"]).is_relative_to(megatron) for record in training)


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A curve to watch the loss by."""
    t = np.linspace(0.01, 1, 100)
    curve = Curve("a finished run", final_loss=4.0, t=t, l=1 + 0.4 * (t**-0.2 - 1))
    write_curve(curve, tmp_path / "reference.json")
    return tmp_path / "reference.json"


def patched_copy(plain: Path, folder: Path) -> Path:
    shutil.copytree(plain, folder)
    apply_patches(folder)
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_same_numbers_with_hooks_and_with_patches(
    version: str, corpus: Path, tmp_path: Path, reference: Path
) -> None:
    plain = sources(version)
    patched = patched_copy(plain, tmp_path / "patched")
    watch = f"--collapse-reference {reference} --tensorboard-dir {tmp_path}/log"
    evaluate = "--eval-interval 2 --eval-iters 1"

    with ThreadPoolExecutor() as both:  # most of the time goes into importing Megatron
        unpatched = both.submit(run_in, plain, corpus, tmp_path, evaluate, f"{RRFP} {evaluate}")
        (native,) = run_in(patched, corpus, tmp_path, f"alone {RRFP} {watch} {evaluate}")
        own, hooked = unpatched.result()

    check_same(own, hooked)
    check_same(own, native)
    check_used(plain, own + hooked)
    check_used(patched, native)
    for record in own:
        assert record["schedule_module"] == "megatron.core.pipeline_parallel.schedules"
    for record in (*hooked, *native):
        assert record["schedule"] == "megatron_ext.pipeline.stage.StageExecutor"
        assert record["task_orders"]
    log = [file.read_bytes() for file in (tmp_path / "log").iterdir()]
    for name in (b"rrfp/bubble fraction", b"collapse/reference", b"collapse/alarm"):
        assert any(name in file for file in log), name
    step = ["on_train_step_start", "on_train_step_end", "on_log"]
    evaluation = ["on_eval_start", "on_eval_step_start", "on_eval_step_end", "on_eval_end"]
    at_end = [event.replace("eval", "test") for event in evaluation]
    for record in native:
        assert record["events"] == [
            *("on_train_start", *step, *step, *evaluation, *step, "on_train_end"),
            *(*evaluation, *at_end),
        ]


@pytest.mark.parametrize("version", VERSIONS if FULL else VERSIONS[-1:])
def test_two_weight_versions_and_a_stop_with_patches(
    version: str, corpus: Path, tmp_path: Path, reference: Path
) -> None:
    patched = patched_copy(sources(version), tmp_path / "patched")
    delayed = f"{RRFP} --pipedream-2bw --optimizer muon"
    stop = f"--collapse-reference {reference} --collapse-action stop --train-iters 9"
    through_us, native, off, stopped, refused = run_in(
        patched,
        corpus,
        tmp_path,
        delayed,
        f"alone {delayed}",
        "alone",
        f"alone faulty {stop}",
        "alone --pipedream-2bw",
    )
    check_same(through_us, native)
    assert native[0]["hooks"] == through_us[0]["hooks"]
    check_same(off, off)
    for record in off:
        assert record["hooks"] == [hook.target for hook in (*hooks.WHEEL_HOOKS, *hooks.CPU_HOOKS)]
        assert record["schedule_module"] == "megatron.core.pipeline_parallel.schedules"
    for record in stopped:
        assert record["exit_code"] == COLLAPSE_EXIT_CODE, record["output"]
    assert "ALARM: nan" in stopped[-1]["output"]
    for record in refused:
        assert record["exit_code"] == 2
        assert "error: --pipedream-2bw needs --pipeline-schedule rrfp" in record["output"]
        assert "Traceback" not in record["output"]
