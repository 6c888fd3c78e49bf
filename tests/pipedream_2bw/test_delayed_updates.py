"""Two weight versions on the executor: every digit of a plain reference, whatever the order."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.pipedream_2bw import reference
from tests.training import RRFP, Disturbance, train_well

pytestmark = pytest.mark.multiprocess

PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
DELAYED = [*RRFP, "--pipedream-2bw"]

# name, processes, Megatron's flags, ours
SETTINGS = [
    ("pp2", 2, PP2, ""),
    ("pp2-bf", 2, PP2, "--rrfp-hint bf"),
    ("pp2-bfw", 2, PP2, "--rrfp-hint bfw --rrfp-live-limit 1"),
    ("pp2-bfw-pieces", 2, PP2, "--rrfp-hint bfw-pieces"),
    ("pp4", 4, PP4, "--rrfp-live-limit 2p"),
    ("pp2-muon", 2, f"{PP2} --optimizer muon", ""),
    ("pp2-sgd", 2, f"{PP2} --optimizer sgd", ""),
    ("pp2-bf16", 2, f"{PP2} --bf16", ""),
    ("pp2-fp16", 2, f"{PP2} --fp16 --initial-loss-scale 2e5 --hysteresis 1", ""),
    ("pp2-vpp2", 2, f"{PP2} {VPP2}", ""),
    ("pp2-tp2", 4, f"{PP2} {TP2}", ""),
    ("pp2-dp2", 4, PP2, ""),
    ("pp2-dp2-overlap", 4, f"{PP2} --use-distributed-optimizer --overlap-grad-reduce", ""),
    ("pp2-dp2-bf16", 4, f"{PP2} --bf16 --use-distributed-optimizer", ""),
    # Megatron's layer-wise optimizer itself does not start in fp32.
    ("pp2-dp2-muon", 4, f"{PP2} --bf16 --optimizer muon --use-distributed-optimizer", ""),
    ("untied", 2, f"{PP2} --untie-embeddings-and-output-weights", ""),
    ("fewer-microbatches-than-stages", 4, f"{PP4} --global-batch-size 3", ""),
    ("one-microbatch", 4, f"{PP4} --global-batch-size 1", ""),
    ("evaluation", 2, f"{PP2} --eval-interval 2 --eval-iters 2", "--rrfp-live-limit 2p"),
    ("per-token-loss", 2, f"{PP2} --calculate-per-token-loss", ""),
    # Megatron's experts have no biases of their own where nothing is fused.
    (
        "experts",
        4,
        f"{PP2} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
        " --expert-model-parallel-size 2 --no-bias-gelu-fusion --disable-bias-linear",
        "",
    ),
]


@pytest.mark.parametrize(
    ("processes", "flags", "ours"), [s[1:] for s in SETTINGS], ids=[s[0] for s in SETTINGS]
)
def test_equals_the_reference(corpus: Path, processes: int, flags: str, ours: str) -> None:
    common = f"{flags} --train-iters 6"
    plain = train_well(corpus, processes, common, observe=reference.install)
    delayed = train_well(
        corpus,
        processes,
        [*common.split(), *DELAYED, *ours.split()],
        disturbance=Disturbance(delay_seed=1),
    )
    assert_same(plain, delayed)
    assert any(_overlaps(record) for record in delayed)


def assert_same(plain: list[dict[str, Any]], delayed: list[dict[str, Any]]) -> None:
    """Every loss, gradient norm and weight, on every rank."""
    for theirs, ours in zip(plain, delayed, strict=True):
        assert ours["steps"] == theirs["steps"]
        assert ours["weights"] == theirs["weights"]


def _overlaps(record: dict[str, Any]) -> bool:
    """Whether a call ran a forward of the next batch: the last call of the run can run none."""
    forwards = [sum(t.startswith("forward") for t in order) for order in record["task_orders"]]
    return max(forwards) > forwards[-1]


def test_batches_that_grow(corpus: Path) -> None:
    # Sizes 4, 4, 6, 6, 8, 8: thresholds are in tokens.
    flags = [*PP2.split(), "--train-iters", "6", "--step-batch-size-schedule", "0:4 256:6 640:8"]
    plain = train_well(corpus, 2, flags, observe=reference.install)
    delayed = train_well(corpus, 2, [*flags, *DELAYED], disturbance=Disturbance(delay_seed=4))
    assert_same(plain, delayed)


@pytest.mark.parametrize("coefficient", [0.0, 0.7])
def test_error_feedback_coefficient(corpus: Path, coefficient: float) -> None:
    flags = f"{PP2} --train-iters 5"
    plain = train_well(
        corpus, 2, flags, observe=functools.partial(reference.install, coefficient=coefficient)
    )
    ours = ["--pipedream-2bw-error-feedback", str(coefficient)]
    assert_same(plain, train_well(corpus, 2, [*flags.split(), *DELAYED, *ours]))


def test_synchronous_start_and_end(corpus: Path) -> None:
    flags = f"{PP2} --train-iters 8"
    plain = train_well(
        corpus, 2, flags, observe=functools.partial(reference.install, start=2, end=6)
    )
    ours = ["--pipedream-2bw-start-iteration", "0.25", "--pipedream-2bw-end-iteration", "6"]
    delayed = train_well(
        corpus, 2, [*flags.split(), *DELAYED, *ours], disturbance=Disturbance(delay_seed=3)
    )
    assert_same(plain, delayed)
