"""Two weight versions in a pipeline, against one process that holds the whole model twice."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.pipedream_2bw import reference
from tests.training import RRFP, Disturbance, train_well

pytestmark = pytest.mark.multiprocess

UPDATES = 50
MODEL = f"--untie-embeddings-and-output-weights --global-batch-size 4 --train-iters {UPDATES}"
PIPELINES = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2-vpp2": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
}


@pytest.fixture(scope="module")
def weights(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that start a run, of any layout, from the same weights."""
    folder = tmp_path_factory.mktemp("weights")
    save = ["--save", str(folder), "--save-interval", "1", "--exit-interval", "1"]
    train_well(corpus, 1, [*MODEL.split(), *save])
    return ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def single(corpus: Path, weights: list[str]) -> dict[str, Any]:
    """What one process computes, without clipping."""
    flags = [*MODEL.split(), *weights, "--clip-grad", "0"]
    return train_well(corpus, 1, flags, observe=reference.install)[0]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_fifty_updates_to_the_last_bit(
    corpus: Path, weights: list[str], single: dict[str, Any], pipeline: str
) -> None:
    processes, layout = PIPELINES[pipeline]
    flags = [*MODEL.split(), *weights, *layout.split(), *RRFP, "--pipedream-2bw"]
    records = train_well(
        corpus,
        processes,
        [*flags, "--clip-grad", "0", "--pipedream-2bw-clip", "off"],
        disturbance=Disturbance(delay_seed=1) if pipeline == "pp2" else None,
    )
    losses = [step[0]["lm loss"] for step in single["steps"]]
    assert len(losses) == UPDATES
    assert [step[0]["lm loss"] for step in records[-1]["steps"]] == losses


def test_clipped_up_to_the_order_of_a_sum(corpus: Path, weights: list[str]) -> None:
    """The norm over stages is a sum of sums, so its last digit differs from one process'."""
    flags = [*MODEL.split(), "--train-iters", "10", *weights]
    alone = train_well(corpus, 1, flags, observe=functools.partial(reference.install))[0]
    pipeline = [*PIPELINES["pp2"][1].split(), *RRFP, "--pipedream-2bw"]
    last = train_well(corpus, 2, [*flags, *pipeline])[-1]
    for theirs, ours in zip(alone["steps"], last["steps"], strict=True):
        assert ours[0]["lm loss"] == pytest.approx(theirs[0]["lm loss"], rel=2e-6)
        assert ours[5] == pytest.approx(theirs[5], rel=2e-5)
