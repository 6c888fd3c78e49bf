"""Megatron's real training loop over NIXL: the same numbers as over gloo, evaluation included."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

from tests.training import RRFP, Disturbance, train, train_well

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not importlib.util.find_spec("nixl"),
        reason="nixl is not installed: pip install megatron_ext[nixl]",
    ),
]

FLAGS = ["--pipeline-model-parallel-size", "3", "--num-layers", "3", *RRFP]
NIXL = ["--rrfp-transport", "nixl"]


def test_same_numbers_as_over_gloo(corpus: Path) -> None:
    flags = [*FLAGS, "--eval-interval", "2", "--eval-iters", "2"]
    over_gloo = train_well(corpus, 3, flags, disturbance=Disturbance(delay_seed=1))
    over_nixl = train_well(corpus, 3, [*flags, *NIXL], disturbance=Disturbance(delay_seed=2))
    for one, other in zip(over_gloo, over_nixl, strict=True):
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]


def test_a_killed_stage_is_named(corpus: Path) -> None:
    flags = [*FLAGS, *NIXL, "--rrfp-timeout", "20"]
    ranks, _ = train(corpus, 3, flags, disturbance=Disturbance(rank=1, kill=True), timeout_s=60)
    assert ranks[1].exit_code == -signal.SIGKILL
    for rank in (ranks[0], ranks[2]):
        assert rank.exit_code == 1, rank.output
        assert "lost stage 1" in rank.error_line
        assert rank.seconds - ranks[1].seconds < 10
