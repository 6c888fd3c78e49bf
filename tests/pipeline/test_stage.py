"""The executor inside Megatron's real training loop: the same numbers as Megatron's schedules."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.training import RRFP, Disturbance, train_well

pytestmark = pytest.mark.multiprocess

EXECUTOR = "megatron_ext.pipeline.stage.StageExecutor"

# name, processes, flags
SETTINGS = [
    ("pp2", 2, "--pipeline-model-parallel-size 2"),
    ("pp4", 4, "--pipeline-model-parallel-size 4"),
    (
        "pp2-dp2-distributed-optimizer",
        4,
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
    ),
    (
        "pp2-dp2-overlapped-gather",
        4,
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce"
        " --overlap-param-gather --no-align-grad-reduce",
    ),
    ("bf16", 2, "--pipeline-model-parallel-size 2 --bf16"),
    ("untied", 2, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"),
    (
        "recomputation",
        2,
        "--pipeline-model-parallel-size 2 --recompute-granularity full"
        " --recompute-method uniform --recompute-num-layers 1",
    ),
    ("fewer-microbatches-than-stages", 4, "--pipeline-model-parallel-size 4 --global-batch-size 3"),
    ("one-microbatch", 4, "--pipeline-model-parallel-size 4 --global-batch-size 1"),
    (
        "per-token-loss-and-evaluation",
        2,
        "--pipeline-model-parallel-size 2 --calculate-per-token-loss --eval-interval 2"
        " --eval-iters 2",
    ),
    ("muon", 2, "--pipeline-model-parallel-size 2 --optimizer muon"),
]


@pytest.mark.parametrize(
    ("processes", "flags"), [s[1:] for s in SETTINGS], ids=[s[0] for s in SETTINGS]
)
def test_bit_identical_to_megatron(corpus: Path, processes: int, flags: str) -> None:
    megatron = train_well(corpus, processes, flags)
    disturbance = Disturbance(delay_seed=1)
    rrfp = train_well(corpus, processes, [*flags.split(), *RRFP], disturbance=disturbance)
    for theirs, ours in zip(megatron, rrfp, strict=True):
        assert theirs["schedule"] == "builtins.function"
        assert ours["schedule"] == EXECUTOR
        assert len(theirs["steps"]) == 3
        assert ours["steps"] == theirs["steps"]
        assert ours["weights"] == theirs["weights"]


def test_dropout_does_not_depend_on_order(corpus: Path) -> None:
    flags = [
        *shlex.split(
            "--pipeline-model-parallel-size 4 --hidden-dropout 0.1 --attention-dropout 0.1"
        ),
        *RRFP,
    ]
    first, second = (
        train_well(corpus, 4, flags, disturbance=Disturbance(delay_seed=seed)) for seed in (1, 2)
    )
    without = train_well(corpus, 4, ["--pipeline-model-parallel-size", "4", *RRFP])
    assert _orders(first) != _orders(second), "the delays did not change any order"
    for one, other in zip(first, second, strict=True):
        assert one["steps"] == other["steps"]
        assert one["weights"] == other["weights"]
    assert first[-1]["steps"] != without[-1]["steps"], "dropout was not on"


@pytest.mark.parametrize(("limit", "most"), [("1", 1), ("p", 4), ("1.5p", 6)])
def test_live_limit_is_kept(corpus: Path, limit: str, most: int) -> None:
    flags = ["--pipeline-model-parallel-size", "4", *RRFP, "--rrfp-live-limit", limit]
    records = train_well(corpus, 4, flags)
    assert max(record["peak_live"] for record in records) == most


def _orders(records: list[dict[str, Any]]) -> list[Any]:
    return [record["task_orders"] for record in records]
