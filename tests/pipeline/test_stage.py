"""The executor inside Megatron's real training loop: the same numbers as Megatron's schedules."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.pipeline.hints import HINTS
from tests.training import RRFP, Disturbance, train_well

pytestmark = pytest.mark.multiprocess

EXECUTOR = "megatron_ext.pipeline.stage.StageExecutor"

PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce"

# name, processes, Megatron's flags, hints
SETTINGS = [
    ("pp2", 2, PP2, [*HINTS]),
    ("pp4", 4, PP4, ["bf", "bfw-depth"]),
    ("pp2-dp2-distributed-optimizer", 4, f"{PP2} {OVERLAP}", ["bf", "bfw-depth", "bfw-pieces"]),
    (
        "pp2-dp2-overlapped-gather",
        4,
        f"{PP2} {OVERLAP} --overlap-param-gather --no-align-grad-reduce",
        ["bf", "bfw-depth"],
    ),
    ("pp2-bf16", 2, f"{PP2} --bf16", ["bf", "bfw-depth"]),
    ("untied", 2, f"{PP2} --untie-embeddings-and-output-weights", ["bf"]),
    (
        "recomputation",
        2,
        f"{PP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ["bf", "bfw-depth"],
    ),
    ("fewer-microbatches-than-stages", 4, f"{PP4} --global-batch-size 3", ["bf", "bfw-depth"]),
    ("one-microbatch", 4, f"{PP4} --global-batch-size 1", ["bf", "bfw"]),
    (
        "per-token-loss-and-evaluation",
        2,
        f"{PP2} --calculate-per-token-loss --eval-interval 2 --eval-iters 2",
        ["bf", "1f1b"],
    ),
    ("muon", 2, f"{PP2} --optimizer muon", ["bfw-depth"]),
    ("pp2-vpp2", 2, f"{PP2} {VPP2} --eval-interval 2 --eval-iters 1", [*HINTS]),
    (
        "pp2-vpp2-dp2-bf16",
        4,
        f"{PP2} {VPP2} {OVERLAP} --overlap-param-gather --bf16",
        ["bf", "bfw-depth"],
    ),
    ("pp2-tp2", 4, f"{PP2} {TP2}", ["bf", "bfw-depth", "bfw-pieces", "1f1b"]),
    ("pp2-tp2-vpp2-bf16", 4, f"{PP2} {TP2} {VPP2} --bf16", ["bfw-depth"]),
    # Eight processes share few cores here, so the batches are small.
    ("pp2-tp4", 8, f"{PP2} --tensor-model-parallel-size 4 --global-batch-size 4", ["bfw-depth"]),
]


@pytest.mark.parametrize(
    ("processes", "flags", "hints"), [s[1:] for s in SETTINGS], ids=[s[0] for s in SETTINGS]
)
def test_bit_identical_to_megatron(
    corpus: Path, processes: int, flags: str, hints: list[str]
) -> None:
    megatron = train_well(corpus, processes, flags)
    for seed, hint in enumerate(hints):
        rrfp = train_well(
            corpus,
            processes,
            [*flags.split(), *RRFP, "--rrfp-hint", hint],
            disturbance=Disturbance(delay_seed=seed),
        )
        for theirs, ours in zip(megatron, rrfp, strict=True):
            assert theirs["schedule"] == "builtins.function"
            assert ours["schedule"] == EXECUTOR
            assert len(theirs["steps"]) == 3
            assert ours["steps"] == theirs["steps"], hint
            assert ours["weights"] == theirs["weights"], hint
            weight_tasks = any("weight" in task for task in ours["task_orders"][0])
            assert weight_tasks == HINTS[hint].splits_weight


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


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize(("limit", "most"), [("1", 1), ("p", 4), ("1.5p", 6)])
def test_live_limit_is_kept(corpus: Path, hint: str, limit: str, most: int) -> None:
    flags = ["--pipeline-model-parallel-size", "4", *RRFP, "--rrfp-live-limit", limit]
    flags += ["--rrfp-hint", hint]
    records = train_well(corpus, 4, flags)
    assert max(record["peak_live"] for record in records) == most


def _orders(records: list[dict[str, Any]]) -> list[Any]:
    return [record["task_orders"] for record in records]
