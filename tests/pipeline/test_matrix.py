"""Every hint in every combination of parallelisms: Megatron's own numbers, to the last bit.

Takes more than an hour on two cores, so it runs only when asked for: ``scripts/test.sh -m matrix``.
"""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest

from megatron_ext.pipeline.hints import HINTS
from tests.training import RRFP, Disturbance, train_well

pytestmark = [pytest.mark.multiprocess, pytest.mark.matrix, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("stages", "chunks", "tensor", "data", "dtype"),
    itertools.product((2, 4), (1, 2), (1, 2), (1, 2), ("fp32", "bf16")),
)
def test_every_hint_gives_megatrons_numbers(
    corpus: Path, stages: int, chunks: int, tensor: int, data: int, dtype: str
) -> None:
    processes = stages * tensor * data
    flags = shlex.split(
        f"--pipeline-model-parallel-size {stages} --tensor-model-parallel-size {tensor}"
        f" --num-layers {max(4, stages * chunks)} --train-iters 2"
    )
    if chunks > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    if dtype == "bf16":
        flags += ["--bf16"]
    megatron = train_well(corpus, processes, flags, timeout_s=280)
    for seed, hint in enumerate(HINTS):
        rrfp = train_well(
            corpus,
            processes,
            [*flags, *RRFP, "--rrfp-hint", hint],
            disturbance=Disturbance(delay_seed=seed),
            timeout_s=280,
        )
        for theirs, ours in zip(megatron, rrfp, strict=True):
            assert len(theirs["steps"]) == 2
            assert ours["steps"] == theirs["steps"], hint
            assert ours["weights"] == theirs["weights"], hint
