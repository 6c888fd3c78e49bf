"""The shipped job files on a real cluster of two nodes, with a model that a CPU can train."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_ext.collapse.sources import read_history
from megatron_ext.collapse.sources.options import SourceOptions
from tests.ranks import check_ranks
from tests.slurm.cluster import Cluster
from tests.slurm.small_jobs import (
    FAMILY_FILE,
    MUON_FILE,
    RRFP_FILE,
    expected_in_log,
    losses_in,
    small,
    tensors_of,
    training_flags,
)
from tests.training import train

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ITERATIONS = 24
SLOW = "--rrfp-jitter 1.0,8,1.0"
"""Delays, so that a signal comes in the middle; they do not change what is computed."""
QUICK = "--ckpt-format torch"
"""Saved by the rank itself, not by a process that first imports everything again."""


@dataclass
class Whole:
    """The same training in one go and without SLURM."""

    checkpoints: Path
    log: Path
    losses: list[float]
    """Of every iteration, exactly."""


def train_uninterrupted(corpus: Path, file: Path, variables: dict[str, str], folder: Path) -> Whole:
    """Train with the flags of the job file."""
    flags = training_flags(file, variables)
    for flag in ("--save", "--load"):
        flags[flags.index(flag) + 1] = str(folder)
    ranks, records = train(corpus, 2, flags)
    check_ranks(ranks)
    log = folder.with_suffix(".log")
    log.write_text("".join(rank.output for rank in ranks))
    return Whole(folder, log, [step[0]["lm loss"] for step in records[-1]["steps"]])


def run_interrupted(
    cluster: Cluster, file: Path, variables: dict[str, str], folder: Path
) -> dict[str, str]:
    """Submit the job, tell it in its third iteration that its time is over, wait for its end."""
    job = cluster.submit(file, variables, "--nodes=2", cwd=folder)
    log = Path(variables["RUN_DIR"]) / "train.log"
    until = time.monotonic() + 240
    while "iteration        2/" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < until, f"no second iteration\n{_tails(folder, log)}"
        assert cluster.jobs(job)[0]["JobState"] in ("PENDING", "RUNNING"), _tails(folder, log)
        time.sleep(0.1)
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    (end,) = cluster.wait(job, 300)
    assert end["JobState"] == "COMPLETED", _tails(folder, log)
    assert end["Restarts"] == "1", _tails(folder, log)
    return end


def check_same(whole: Whole, variables: dict[str, str], folder: Path) -> None:
    """Logged losses, and every tensor of the last checkpoint, are those of the run in one go."""
    run = Path(variables["RUN_DIR"])
    (job,) = folder.glob("*.out")
    starts = [int(n) for n in re.findall(r"start \d+ from iteration (\d+)", job.read_text())]
    assert starts[0] == 0
    assert 2 <= starts[1] < ITERATIONS
    assert len(starts) == 2
    printed = losses_in((run / "train.log").read_text())
    assert printed == expected_in_log(whole.losses, starts)
    expected = tensors_of(whole.checkpoints, ITERATIONS)
    found = tensors_of(run / "checkpoints", ITERATIONS)
    assert found.keys() == expected.keys()
    assert len(expected) > 20
    for name, tensor in expected.items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(found[name])), name


def _tails(folder: Path, *logs: Path) -> str:
    files = [*folder.glob("*.out"), *(log for log in logs if log.exists())]
    return "\n".join(
        f"---- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-40:])
        for file in files
    )


def test_rrfp_is_requeued_and_ends_as_if_it_had_not_been(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    variables = small(corpus, tmp_path / "run", TRAIN_ITERS=str(ITERATIONS))
    whole = train_uninterrupted(corpus, RRFP_FILE, variables, tmp_path / "whole")
    reference = tmp_path / "reference.json"
    make_reference(whole.log, reference)
    variables |= {
        "COLLAPSE_REFERENCE": str(reference),
        "WANDB_PROJECT": "test",
        "EXTRA_FLAGS": SLOW,
    }
    run_interrupted(cluster, RRFP_FILE, variables, tmp_path)
    check_same(whole, variables, tmp_path)

    # The watch went on, and both starts wrote into one wandb run.
    log = tmp_path / "run" / "train.log"
    assert "collapse: statistics go on from iteration" in log.read_text()
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "run" / "wandb-run-id").read_text().strip()
    assert len(folders) == 2
    assert all(folder.name.endswith(f"-{run_id}") for folder in folders)
    logged = {}
    for folder in folders:
        history = read_history(str(folder), SourceOptions(column="lm loss"))
        logged.update(zip(history.steps, history.losses, strict=True))
    assert logged == {number + 1: loss for number, loss in enumerate(whole.losses)}


def make_reference(log: Path, reference: Path) -> None:
    """A curve file of a finished run."""
    from megatron_ext import cli

    assert cli.main(["collapse", "fit", str(log), "--out", str(reference)]) == 0


def test_two_versions_are_requeued_and_end_as_if_they_had_not_been(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    variables = small(corpus, tmp_path / "run", TRAIN_ITERS=str(ITERATIONS))
    # Delayed already when the signal comes.
    variables |= {"PIPEDREAM_2BW_FLAGS": "--pipedream-2bw-start-iteration 1"}
    variables |= {"EXTRA_FLAGS": QUICK}
    whole = train_uninterrupted(corpus, MUON_FILE, variables, tmp_path / "whole")
    variables |= {"EXTRA_FLAGS": f"{QUICK} {SLOW}"}
    run_interrupted(cluster, MUON_FILE, variables, tmp_path)
    check_same(whole, variables, tmp_path)


def test_a_family_leaves_a_curve_per_size(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    sizes = {"1x16x2": 12 * 16 * 16 + 257 * 16, "2x32x4": 2 * 12 * 32 * 32 + 257 * 32}
    variables = small(
        corpus,
        tmp_path / "family",
        SIZES=" ".join(sizes),
        VOCABULARY="257",
        SEQUENCE_LENGTH="32",
        TPP="2",
        RECIPE_FLAGS="--lr 3e-3 --batch-tokens 512",
        MODEL_FLAGS="--attention-dropout 0 --hidden-dropout 0",
        EXTRA_FLAGS=QUICK,
    )
    job = cluster.submit(FAMILY_FILE, variables, "--array=0-1", cwd=tmp_path)
    ends = cluster.wait(job, 300)
    assert [end["JobState"] for end in ends] == ["COMPLETED"] * 2, _tails(
        tmp_path, *(tmp_path / "family").glob("*/train.log")
    )
    taus = []
    for size, params in sizes.items():
        curve = json.loads((tmp_path / "family" / size / "curve.json").read_text())
        controls = curve["controls"]
        assert controls["tokens"] / params == pytest.approx(2, rel=0.05)
        decay = controls["lr_peak"] * controls["weight_decay"]
        taus.append(controls["batch_tokens"] / decay / controls["tokens"])
        log = (tmp_path / "family" / size / "train.log").read_text()
        assert len(losses_in(log)) == controls["steps"]
    assert taus[0] == pytest.approx(taus[1], rel=0.05)
