"""Every fault at every point of a run: the other ranks say what they waited for and end in time.

Two limits bound every wait. Waits of the executor end after ``--rrfp-timeout``. All others are
Megatron's own collectives: gloo ends each of them after the timeout of its process group, which
is ``--distributed-timeout-minutes`` at first and ``--distributed-timeout-seconds-after-init``
from the second iteration on. A dead rank is noticed at once, since its connections close; only a
stopped one needs the limits.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.pipeline import agreement
from tests.ranks import Rank
from tests.training import RRFP, Disturbance, train

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 4
LIMITS = f"--rrfp-timeout {TIMEOUT_S} --distributed-timeout-seconds-after-init {TIMEOUT_S}"
# A stopped rank is noticed by one limit. Where the next rank waits on a rank that did not notice,
# its own limit runs already.
IN_TIME_S = {"killed": TIMEOUT_S, "disconnected": TIMEOUT_S, "stopped": 2 * TIMEOUT_S}

FAULTS: dict[str, dict[str, Any]] = {
    "killed": {"kill": True},
    "stopped": {"stop": True},
    "disconnected": {"disconnect": True},
}
AWAITED = (
    r"waiting for (the (activation|gradient) of microbatch \d from stage \d \(rank \d\)"
    r"|stage \d \(rank \d\) (or stage \d \(rank \d\) )?to take the results sent to it"
    r"|rank \d|other ranks)"
)
MICROBATCHES = 8
# where it happens, and flags without which it would not
POINTS: dict[str, tuple[Disturbance, str]] = {
    "first-forward": (Disturbance(microbatch=0), ""),
    "steady-state": (Disturbance(microbatch=MICROBATCHES // 2), ""),
    "cooldown": (Disturbance(direction="BACKWARD", microbatch=MICROBATCHES - 1), ""),
    "finalize": (Disturbance(at="finalize"), ""),
    "evaluation": (Disturbance(evaluation=True), "--eval-interval 2 --eval-iters 1"),
    "checkpoint": (Disturbance(at="checkpoint"), "--save-interval 2 --save"),
}


def run(
    corpus: Path,
    folder: Path,
    victim: int,
    fault: str,
    point: str,
    processes: int,
    flags: str,
    observe: Callable[[Any], None] | None = None,
) -> list[Rank]:
    where, extra = POINTS[point]
    if extra.endswith("--save"):
        extra += f" {folder}"
    ranks, _ = train(
        corpus,
        processes,
        shlex.split(f"{flags} {LIMITS} {extra}") + RRFP,
        disturbance=replace(where, rank=victim, **FAULTS[fault]),
        observe=observe,
        timeout_s=90,
    )
    return ranks


def check(ranks: list[Rank], victim: int, fault: str, depth: int) -> None:
    faulty = ranks[victim]
    happened = re.search(r"goes wrong after ([\d.]+) s", faulty.output)
    assert happened, faulty.output
    if fault == "killed":
        assert faulty.exit_code == -signal.SIGKILL
    for rank in ranks:
        if rank is faulty and fault == "killed":
            continue  # the others, once they can, say what they lost
        stage = rank.number * depth // len(ranks)
        assert rank.exit_code == 1, rank.output
        assert f"stage {stage} of {depth} (rank {rank.number}), iteration 2" in rank.error_line
        assert re.search(AWAITED, rank.error_line), rank.error_line
        if rank is not faulty:
            assert rank.seconds - float(happened[1]) < IN_TIME_S[fault], rank.error_line


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_two_stages(corpus: Path, tmp_path: Path, fault: str, point: str) -> None:
    victim = 1 if point in ("first-forward", "finalize", "evaluation") else 0
    flags = "--pipeline-model-parallel-size 2"
    check(run(corpus, tmp_path, victim, fault, point, 2, flags), victim, fault, 2)


@pytest.mark.parametrize(
    ("fault", "point", "victim"),
    [
        ("killed", "steady-state", 2),
        ("killed", "checkpoint", 5),
        ("stopped", "cooldown", 3),
        ("stopped", "evaluation", 4),
        ("disconnected", "first-forward", 6),
        ("disconnected", "finalize", 0),
    ],
)
def test_four_stages_of_two_tensor_parallel_ranks(
    corpus: Path, tmp_path: Path, fault: str, point: str, victim: int
) -> None:
    flags = "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2"
    check(run(corpus, tmp_path, victim, fault, point, 8, flags), victim, fault, 4)


@pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed")
@pytest.mark.parametrize(
    ("fault", "point"), [("killed", "steady-state"), ("stopped", "first-forward")]
)
def test_over_nixl(corpus: Path, tmp_path: Path, fault: str, point: str) -> None:
    flags = "--pipeline-model-parallel-size 2 --rrfp-transport nixl"
    check(run(corpus, tmp_path, 1, fault, point, 2, flags), 1, fault, 2)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_tensor_parallel_ranks_on_several_nodes(corpus: Path, tmp_path: Path, fault: str) -> None:
    flags = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    ranks = run(corpus, tmp_path, 3, fault, "steady-state", 4, flags, observe=_alone_on_a_node)
    check(ranks, 3, fault, 2)


def _alone_on_a_node(_: Any) -> None:
    agreement._host = lambda: os.environ["RANK"]
