"""A rank that dies, hangs or sends garbage: every other rank says so and ends, in time."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.ranks import Rank
from tests.training import RRFP, Disturbance, train

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 3
FLAGS = shlex.split(f"--pipeline-model-parallel-size 4 --rrfp-timeout {TIMEOUT_S}") + RRFP
AWAITED = (
    r"(the (activation|gradient) of microbatch \d+ from stage \d \(rank \d\)( or )?)+"
    r"|stage \d \(rank \d\) to take"
)


def check_line(rank: Rank, expected: str) -> None:
    """The rank ended by itself, with one line that names its stage and what it waited for."""
    assert rank.exit_code == 1, rank.output
    line = rank.error_line
    assert f"stage {rank.number} of 4 (rank {rank.number}), iteration 2:" in line, line
    assert re.search(expected, line), line
    if "all tasks of the batch are done here" not in line:
        assert re.search(AWAITED, line), line
        assert "Traceback" not in rank.output


@pytest.mark.parametrize("direction", ["FORWARD", "BACKWARD"])
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_a_killed_rank(corpus: Path, victim: int, direction: str) -> None:
    disturbance = Disturbance(rank=victim, kill=True, direction=direction)
    ranks, _ = train(corpus, 4, FLAGS, disturbance=disturbance, timeout_s=60)
    killed = ranks.pop(victim)
    assert killed.exit_code == -signal.SIGKILL
    for rank in ranks:
        check_line(rank, "lost stage|no progress|all tasks of the batch are done here")
        assert rank.seconds - killed.seconds < TIMEOUT_S + 2
    neighbours = [rank for rank in ranks if abs(rank.number - victim) == 1]
    assert any(f"lost stage {victim} (rank {victim})" in rank.error_line for rank in neighbours)


def test_a_stalled_stage(corpus: Path) -> None:
    disturbance = Disturbance(rank=1, stall_s=2.5 * TIMEOUT_S)
    ranks, _ = train(corpus, 4, FLAGS, disturbance=disturbance, timeout_s=60)
    stalled = ranks.pop(1)
    for rank in ranks:
        check_line(rank, "no progress for 3 s|lost stage")
        assert rank.seconds < stalled.seconds
    assert any("no progress for 3 s (--rrfp-timeout)" in rank.error_line for rank in ranks)
    check_line(stalled, "lost stage")  # once awake it finds the others gone


def test_a_malformed_header(corpus: Path) -> None:
    disturbance = Disturbance(rank=1, garbage=True)
    ranks, _ = train(corpus, 4, FLAGS, disturbance=disturbance, timeout_s=60)
    assert all(rank.exit_code == 1 for rank in ranks)
    check_line(ranks[2], r"a header starts with b'MXP1', not b'\\x07\\x07\\x07\\x07'")


def test_sigterm_while_waiting(corpus: Path) -> None:
    disturbance = Disturbance(rank=1, stall_s=3, terminate_others=True)
    ranks, _ = train(corpus, 4, FLAGS, disturbance=disturbance, timeout_s=60)
    for number in (0, 2, 3):
        assert ranks[number].exit_code == -signal.SIGTERM
        assert "ended by SIGTERM while waiting for" in ranks[number].error_line
