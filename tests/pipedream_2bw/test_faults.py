"""A rank that dies or hangs while batches overlap: every other rank says so and ends, in time."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pytest

from tests.training import RRFP, Disturbance, train

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 4
FLAGS = [
    *shlex.split(f"--pipeline-model-parallel-size 4 --rrfp-timeout {TIMEOUT_S} --train-iters 5"),
    *RRFP,
    "--pipedream-2bw",
]


@pytest.mark.parametrize("at", ["task", "finalize"])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank(corpus: Path, victim: int, at: str) -> None:
    """Within a task, and within the update's reduction of gradients."""
    # Microbatches are numbered on from batch to batch: the last one of the third batch of eight.
    disturbance = Disturbance(
        rank=victim, iteration=2, at=at, kill=True, microbatch=23, direction="BACKWARD"
    )
    ranks, _ = train(corpus, 4, FLAGS, disturbance=disturbance, timeout_s=60)
    killed = ranks.pop(victim)
    assert killed.exit_code == -signal.SIGKILL
    for rank in ranks:
        assert rank.exit_code == 1, rank.output
        assert f"stage {rank.number} of 4 (rank {rank.number}), iteration" in rank.error_line
        assert rank.seconds - killed.seconds < TIMEOUT_S + 3


def test_an_update_that_hangs(corpus: Path) -> None:
    disturbance = Disturbance(rank=1, iteration=2, at="finalize", stall_s=3 * TIMEOUT_S)
    ranks, _ = train(corpus, 4, FLAGS, disturbance=disturbance, timeout_s=60)
    ranks.pop(1)
    lines = [rank.error_line for rank in ranks]
    assert all(rank.exit_code == 1 for rank in ranks), lines
    assert any(f"no progress for {TIMEOUT_S} s (--rrfp-timeout)" in line for line in lines), lines
    assert any("to reduce gradients and their norm" in line for line in lines), lines
