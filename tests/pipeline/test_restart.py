"""A run that goes on from a checkpoint computes what it would have computed uninterrupted."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.training import RRFP, Disturbance, train, train_well

pytestmark = pytest.mark.multiprocess

PP2 = "--pipeline-model-parallel-size 2"
SIX = "--train-iters 6"


def check_same_end(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """`resumed` has the last iterations of `whole`, to the last bit."""
    for uninterrupted, rank in zip(whole, resumed, strict=True):
        assert len(uninterrupted["steps"]) == 6
        assert rank["steps"] == uninterrupted["steps"][2:]
        assert rank["weights"] == uninterrupted["weights"]


@pytest.mark.parametrize(
    ("processes", "flags"),
    [(2, PP2), (4, f"{PP2} --use-distributed-optimizer --overlap-grad-reduce")],
    ids=["pp2", "pp2-dp2-distributed-optimizer"],
)
def test_a_killed_run_goes_on_from_its_checkpoint(
    corpus: Path, tmp_path: Path, processes: int, flags: str
) -> None:
    words = shlex.split(f"{flags} {SIX} --hidden-dropout 0.1 --attention-dropout 0.1") + RRFP
    whole = train_well(corpus, processes, words, disturbance=Disturbance(delay_seed=1))
    ranks, _ = train(
        corpus,
        processes,
        [*words, "--save", str(tmp_path), "--save-interval", "2"],
        disturbance=Disturbance(delay_seed=2, rank=1, iteration=3, kill=True),
    )
    assert ranks.pop(1).exit_code == -signal.SIGKILL
    for rank in ranks:
        assert rank.exit_code == 1
        assert "iteration 4:" in rank.error_line
    resumed = train_well(
        corpus, processes, [*words, "--load", str(tmp_path)], disturbance=Disturbance(delay_seed=3)
    )
    check_same_end(whole, resumed)


def test_checkpoints_pass_between_schedules(corpus: Path, tmp_path: Path) -> None:
    words = shlex.split(f"{PP2} {SIX}")
    schedules: dict[str, list[str]] = {"megatron": [], "rrfp": RRFP}
    whole = {}
    for name, schedule in schedules.items():
        save = ["--save", str(tmp_path / name), "--save-interval", "2"]
        whole[name] = train_well(corpus, 2, [*words, *schedule, *save])
    for saved, loading in (("megatron", "rrfp"), ("rrfp", "megatron")):
        load = ["--load", str(tmp_path / saved), "--ckpt-step", "2"]
        resumed = train_well(corpus, 2, [*words, *schedules[loading], *load])
        check_same_end(whole["megatron"], resumed)
