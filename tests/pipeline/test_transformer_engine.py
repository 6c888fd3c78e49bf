"""Layers that delay weight gradients by Transformer Engine's interface, in stand-ins.

The package itself needs a GPU; what is real here is everything around the layers.
"""

from __future__ import annotations

import queue
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import UsageError
from megatron_ext.pipeline import transformer_engine
from megatron_ext.pipeline.transformer_engine import delayed_layers
from tests.ranks import check_ranks
from tests.training import RRFP, Disturbance, train

SCRIPT = Path(__file__).parent / "pretrain_delaying.py"
PP2 = "--pipeline-model-parallel-size 2"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (4, "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 5000"),
        (2, "--num-virtual-stages-per-pipeline-rank 2 --bf16"),
        (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ],
    ids=["overlapped-reduction", "virtual-stages-bf16", "recompute"],
)
def test_same_numbers_as_undelayed(corpus: Path, processes: int, flags: str) -> None:
    runs = []
    for ours in ([], [*RRFP, "--rrfp-hint", "bfw-depth"]):
        disturbance = Disturbance(delay_seed=1) if ours else None
        command = shlex.split(f"{PP2} {flags}") + ours
        ranks, records = train(corpus, processes, command, disturbance=disturbance, script=SCRIPT)
        check_ranks(ranks)
        runs.append((ranks, records))
    assert not any("delayed weight gradient" in rank.output for rank in runs[0][0])
    # 4 linear layers in each of the stage's 2, 8 or 4 microbatches, 3 iterations
    for rank in runs[1][0]:
        computed = rank.output.count("computed a delayed weight gradient")
        assert computed == 4 * 2 * (8 if processes == 2 else 4) * 3
    for theirs, ours in zip(runs[0][1], runs[1][1], strict=True):
        assert theirs["steps"]
        assert (ours["steps"], ours["weights"]) == (theirs["steps"], theirs["weights"])


@pytest.mark.multiprocess
def test_earlier_weight_gradients_wait_behind_the_last_backward(corpus: Path) -> None:
    flags = f"{PP2} --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 5000"
    ours = [*RRFP, "--rrfp-hint", "bfw", "--rrfp-live-limit", "2p"]
    slow_first_stage = Disturbance(slow_ms=(30, 30, 0, 0))
    records = []
    for added, disturbance in (([], None), (ours, slow_first_stage)):
        command = shlex.split(flags) + added
        ranks, record = train(corpus, 4, command, disturbance=disturbance, script=SCRIPT)
        check_ranks(ranks)
        records.append(record)
    for order in records[1][0]["task_orders"]:  # of the first stage
        assert order.index("backward of microbatch 3") < order.index("weight of microbatch 2")
    for theirs, mine in zip(*records, strict=True):
        assert theirs["steps"]
        assert (mine["steps"], mine["weights"]) == (theirs["steps"], theirs["weights"])


@pytest.mark.multiprocess
def test_same_numbers_with_two_weight_versions(corpus: Path) -> None:
    records = []
    for hint in ("bf", "bfw"):
        flags = f"{PP2} --pipedream-2bw --optimizer adam --rrfp-hint {hint} --rerun-mode disabled"
        disturbance = Disturbance(delay_seed=2)
        ranks, record = train(
            corpus, 2, shlex.split(flags) + RRFP, disturbance=disturbance, script=SCRIPT
        )
        check_ranks(ranks)
        records.append(record)
    for theirs, ours in zip(*records, strict=True):
        assert theirs["steps"]
        assert (ours["steps"], ours["weights"]) == (theirs["steps"], theirs["weights"])


class Layer(torch.nn.Module):
    """Queues numbers and computes `at_once` of them when asked."""

    def __init__(self, at_once: int = 1, enabled: bool = True) -> None:
        super().__init__()
        self.at_once, self.computed = at_once, list[int]()
        context: queue.Queue[int] = queue.Queue()
        self.wgrad_store = SimpleNamespace(context=context, delay_wgrad_compute=lambda: enabled)

    def backward_dw(self) -> None:
        for _ in range(self.at_once):
            self.computed.append(self.wgrad_store.context.get_nowait())


def test_a_layer_that_runs_never_once_or_several_times_in_a_microbatch() -> None:
    layer = Layer()
    (delayed,) = delayed_layers(torch.nn.Sequential(layer, Layer(enabled=False)))
    counts = []
    for parts in ([0], [], [1, 2, 3], [4]):
        for part in parts:
            layer.wgrad_store.context.put(part)
        counts.append(delayed.count_new())
    assert counts == [1, 0, 3, 1]
    delayed.run(1)
    assert layer.computed == [0]
    layer.wgrad_store.context.put(5)
    assert delayed.count_new() == 1  # a later microbatch's backward before earlier weight tasks
    delayed.run(3)
    assert layer.computed == [0, 1, 2, 3]
    delayed.run(1)
    delayed.run(1)
    assert layer.computed == [0, 1, 2, 3, 4, 5]


def test_a_layer_made_of_two() -> None:
    layer = Layer(at_once=2)
    (delayed,) = delayed_layers(layer)
    for part in range(4):
        layer.wgrad_store.context.put(part)
    assert delayed.count_new() == 4
    delayed.run(2)
    assert layer.computed == [0, 1]
    assert delayed.count_new() == 0


def test_a_layer_that_computes_nothing() -> None:
    layer = Layer(at_once=0)
    (delayed,) = delayed_layers(layer)
    layer.wgrad_store.context.put(0)
    with pytest.raises(RuntimeError, match="Layer keeps weight gradients back"):
        delayed.run(delayed.count_new())


@pytest.mark.parametrize(
    ("settings", "version", "message"),
    [
        ({}, "2.2.0", "needs Transformer Engine 2.3.0 or later"),
        ({"overlap_grad_reduce": True}, "2.7.0", "needs Transformer Engine 2.8.0 or later"),
        ({"tp_comm_overlap": True}, "2.8.0", "does not go with --tp-comm-overlap"),
        ({"use_transformer_engine_op_fuser": True}, "2.8.0", "-op-fuser: "),
        ({"overlap_grad_reduce": True}, "2.8.0", None),
    ],
)
def test_what_cannot_be_delayed(
    settings: dict[str, Any],
    version: str,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import utils

    def at_least(least: str) -> bool:
        return [int(part) for part in version.split(".")] >= [
            int(part) for part in least.split(".")
        ]

    monkeypatch.setattr(utils, "is_te_min_version", at_least)
    args = SimpleNamespace(**{"overlap_grad_reduce": False, **settings})
    if message is None:
        transformer_engine.check_can_delay(args, "bfw")
        return
    with pytest.raises(UsageError, match=f"--rrfp-hint bfw .*{message}.*use --rrfp-hint bf"):
        transformer_engine.check_can_delay(args, "bfw")
