"""Settings of Megatron under which RRFP, too, must compute what Megatron's own schedule does.

Context parallelism is not among them: on the CPU Megatron itself has no attention for it
(``Context parallelism is only supported by TEDotProductAttention``). Sequence parallelism is not,
since PyTorch's layer norms, the only ones on the CPU, do not support it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks import Rank, check_ranks
from tests.training import RRFP, Disturbance, train

pytestmark = pytest.mark.multiprocess

PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
VARIANT = Path(__file__).parent / "pretrain_variant.py"
# Megatron's experts have no biases of their own where nothing is fused.
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
    " --no-bias-gelu-fusion --disable-bias-linear"
)


def compare(
    corpus: Path,
    processes: int,
    flags: str,
    *,
    hints: Sequence[str] = ("bf", "bfw-depth"),
    slow_ms: tuple[float, ...] = (),
    variant: bool = False,
) -> list[list[Rank]]:
    """Train under Megatron's schedule and under hints, and compare to the last bit.

    Returns:
        How the ranks of each run ended.
    """
    runs = []
    for seed, hint in enumerate([None, *hints]):
        ours = [*RRFP, "--rrfp-hint", hint] if hint else []
        runs.append(
            train(
                corpus,
                processes,
                shlex.split(flags) + ours,
                disturbance=Disturbance(delay_seed=seed, slow_ms=slow_ms) if hint else None,
                **({"script": VARIANT} if variant else {}),
            )
        )
    for ranks, _ in runs:
        check_ranks(ranks)
    megatron = runs[0][1]
    for _, rrfp in runs[1:]:
        for theirs, ours in zip(megatron, rrfp, strict=True):
            assert theirs["schedule"] == "builtins.function"
            assert ours["schedule"].startswith("megatron_ext.")
            assert theirs["steps"]
            assert ours["steps"] == theirs["steps"]
            assert ours["weights"] == theirs["weights"]
    return [ranks for ranks, _ in runs]


def reports(rank: Rank) -> list[list[str]]:
    """What Megatron's log says of each iteration, without its times."""
    lines = [line for line in rank.output.splitlines() if " iteration " in line and "|" in line]
    return [[item for item in line.split("|")[1:] if "elapsed" not in item] for line in lines]


def test_batches_that_grow(corpus: Path) -> None:
    # Megatron 0.19 ignores --rampup-batch-size in favour of this flag; thresholds are in tokens.
    growing = "--step-batch-size-schedule '0:4 256:6 640:8' --train-iters 6"
    runs = compare(corpus, 2, f"{PP2} {growing}")
    for ranks in runs:
        sizes = re.findall(r"global batch size: +(\d+)", ranks[-1].output)
        assert sizes == ["4", "4", "6", "6", "8", "8"]


def test_skipped_steps_in_fp16(corpus: Path) -> None:
    flags = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1"
    runs = compare(corpus, 2, f"{PP2} {flags} --train-iters 6", hints=["bfw-depth"])
    output = runs[1][1].output
    scales = [float(scale) for scale in re.findall(r"loss scale: ([\d.]+)", output)]
    assert min(scales) < scales[0], "no step was skipped"
    assert scales[-1] > min(scales), "no step was done"
    assert reports(runs[0][1]) == reports(runs[1][1])


@pytest.mark.parametrize(
    ("processes", "flags"),
    [(2, VPP2), (4, "--expert-model-parallel-size 2")],
    ids=["virtual-stages", "expert-parallel"],
)
def test_experts_with_auxiliary_losses(corpus: Path, processes: int, flags: str) -> None:
    runs = compare(corpus, processes, f"{PP2} {EXPERTS} {flags}", hints=["bfw-depth"])
    theirs, ours = (reports(ranks[-1]) for ranks in runs)
    assert len(theirs) == 3
    assert any("load_balancing_loss" in item for item in theirs[0])
    assert any("z_loss" in item for item in theirs[0])
    assert ours == theirs


@pytest.mark.parametrize(
    ("processes", "flags"),
    [(4, PP4), (4, f"{PP2} --tensor-model-parallel-size 2 {VPP2}")],
    ids=["pp4", "pp2-tp2-vpp2"],
)
def test_microbatches_of_different_lengths(corpus: Path, processes: int, flags: str) -> None:
    # Some activations travel with their header, longer ones by themselves.
    size = "--seq-length 256 --max-position-embeddings 256 --hidden-size 128"
    flags = f"{flags} {size} --variable-lengths"
    runs = compare(corpus, processes, flags, hints=["bfw-depth"], variant=True)
    lengths = set(re.findall(r"length (\d+)", runs[1][0].output))
    assert {"64", "256"} <= lengths


@pytest.mark.parametrize("chunks", ["", VPP2], ids=["", "virtual-stages"])
def test_partial_activation_checkpoints(corpus: Path, chunks: str) -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = f"{PP2} {chunks} {recompute} --partial-checkpoints 1 --train-iters 1"
    runs = compare(corpus, 2, flags, hints=["bfw-depth"], variant=True)
    for theirs, ours in zip(*runs, strict=True):
        chosen = [re.findall(r"checkpointed: (.*)", rank.output) for rank in (theirs, ours)]
        assert len(chosen[0]) == 8 * (2 if chunks else 1)
        # Forwards of one chunk keep their order; those of different chunks do not.
        assert sorted(chosen[1], key=_chunk) == sorted(chosen[0], key=_chunk)
    outputs = "".join(rank.output for rank in runs[1])
    assert "True" in outputs


def test_slow_first_stages_with_few_layers(corpus: Path) -> None:
    flags = f"{PP4} --num-layers 7 --decoder-first-pipeline-num-layers 1"
    flags += " --decoder-last-pipeline-num-layers 2"
    compare(corpus, 4, flags, slow_ms=(20, 12, 2, 2))


def _chunk(line: str) -> str:
    return line.split()[1]
