"""Interrupted runs go on where they were, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from megatron_ext.megatron_version import megatron_version
from tests.training import RRFP, Disturbance, train, train_well

pytestmark = pytest.mark.multiprocess

PP2 = "--pipeline-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
DELAYED = [*RRFP, "--pipedream-2bw"]

# name, processes, Megatron's flags
SETTINGS = [
    ("adam", 2, PP2),
    ("muon", 2, f"{PP2} --optimizer muon"),
    ("torch-format", 2, f"{PP2} --ckpt-format torch"),
    ("async", 2, f"{PP2} --async-save --async-strategy mcore"),
    ("bf16", 2, f"{PP2} --bf16"),
    ("fp16", 2, f"{PP2} --fp16 --initial-loss-scale 2e5 --hysteresis 1"),
    ("vpp2", 2, f"{PP2} {VPP2}"),
    ("distributed-optimizer", 4, f"{PP2} --bf16 --use-distributed-optimizer"),
]


@pytest.mark.parametrize(
    ("processes", "flags"), [s[1:] for s in SETTINGS], ids=[s[0] for s in SETTINGS]
)
def test_resumed_is_uninterrupted(corpus: Path, tmp_path: Path, processes: int, flags: str) -> None:
    common = [*f"{flags} --train-iters 6".split(), *DELAYED]
    whole = train_well(corpus, processes, common, disturbance=Disturbance(delay_seed=1))
    keep = [*common, "--save", str(tmp_path), "--save-interval", "3"]
    first = train_well(corpus, processes, [*keep, "--exit-interval", "3"])
    second = train_well(corpus, processes, [*keep, "--load", str(tmp_path)])
    for all_steps, before, after in zip(whole, first, second, strict=True):
        assert len(before["steps"]) == len(after["steps"]) == 3
        assert before["steps"] + after["steps"] == all_steps["steps"]
        assert after["weights"] == all_steps["weights"]


def test_from_synchronous_and_back(corpus: Path, tmp_path: Path) -> None:
    """A flushed run goes on delayed, as if it had started so, and a delayed one goes on flushed."""
    flags = f"{PP2} --train-iters 6".split()
    start = ["--pipedream-2bw-start-iteration", "2", "--pipedream-2bw-end-iteration", "4"]
    whole = train_well(corpus, 2, [*flags, *DELAYED, *start])
    keep = [*flags, "--save", str(tmp_path), "--save-interval", "2"]
    load = ["--load", str(tmp_path)]
    pieces = [
        train_well(corpus, 2, [*keep, "--exit-interval", "2"]),
        train_well(corpus, 2, [*keep, *load, *DELAYED, "--exit-interval", "4", *start[2:]]),
        train_well(corpus, 2, [*keep, *load]),
    ]
    for number, record in enumerate(whole):
        steps: list[Any] = [step for piece in pieces for step in piece[number]["steps"]]
        assert steps == record["steps"]
        assert pieces[-1][number]["weights"] == record["weights"]


def test_onto_another_number_of_replicas(corpus: Path, tmp_path: Path) -> None:
    """Sums over replicas differ in their last digits, so only nearly the same."""
    flags = f"{PP2} --train-iters 6 --ckpt-fully-parallel-save".split()
    whole = train_well(corpus, 2, [*flags, *DELAYED])
    keep = [*flags, *DELAYED, "--save", str(tmp_path), "--save-interval", "3"]
    train_well(corpus, 4, [*keep, "--exit-interval", "3"])
    resumed = train_well(corpus, 2, [*keep, "--load", str(tmp_path)])
    losses = [step[0]["lm loss"] for step in whole[-1]["steps"][3:]]
    assert [s[0]["lm loss"] for s in resumed[-1]["steps"]] == pytest.approx(losses, rel=1e-4)


@pytest.mark.skipif(
    megatron_version() >= Version("0.19"), reason="from 0.19 on these formats keep it"
)
@pytest.mark.parametrize("flag", ["--dist-ckpt-optim-fully-reshardable", "--ckpt-format torch"])
def test_a_format_that_loses_the_last_update_is_refused(
    flag: str, corpus: Path, tmp_path: Path
) -> None:
    flags = [*f"{PP2} --bf16 --use-distributed-optimizer {flag}".split(), *DELAYED]
    save = ["--save", str(tmp_path), "--save-interval", "9"]
    ranks, _ = train(corpus, 2, [*flags, *save])
    for rank in ranks:
        assert rank.exit_code == 2, rank.output
        assert f"{flag} of this Megatron saves no last update" in rank.error_line
    ranks, _ = train(corpus, 2, [*flags, "--pipedream-2bw-error-feedback", "0"])
    assert [rank.exit_code for rank in ranks] == [0, 0]
