"""What a pipeline costs: the figures, and where they are logged."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.pipeline.batch_statistics import BatchStatistics, MessageTime, Span, TaskSpan
from megatron_ext.pipeline.metrics import Interval, report
from megatron_ext.pipeline.task import Direction, Header, Kind, Task
from tests.training import RRFP, train_well
from tests.wandb_file import read_wandb_run

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD


def make_batch(busy_s: float, batch_s: float, peak_live: int) -> BatchStatistics:
    batch = BatchStatistics(False, started=10.0, ended=10.0 + batch_s, peak_live=peak_live)
    middle = 10.0 + busy_s / 2
    batch.tasks = [
        TaskSpan(Task(FORWARD, 0), 10.0, middle),
        TaskSpan(Task(BACKWARD, 0), middle, middle + busy_s / 2),
    ]
    batch.waits = [Span(10.0 + busy_s, 10.0 + batch_s)]
    batch.dispatch_s = [1e-6, 2e-6, 30e-6]
    batch.arrived = [
        MessageTime(Header(0, Direction.BACKWARD, 0, 0, 1, ()), middle - 0.25),
        MessageTime(Header(0, Direction.FORWARD, 7, 0, 1, ()), 9.0),  # never used
    ]
    return batch


def test_a_batch() -> None:
    batch = make_batch(6.0, 8.0, 3)
    assert batch.bubble_fraction == pytest.approx(0.25)
    assert batch.waiting_s == pytest.approx(2)
    assert batch.order == [Task(FORWARD, 0), Task(BACKWARD, 0)]
    assert batch.message_ages_s() == pytest.approx([0.25])


def test_a_wait_goes_on_until_a_task_runs() -> None:
    batch = BatchStatistics(False)
    for _ in range(3):
        with batch.waiting():
            pass
    with batch.running(Task(FORWARD, 0)):
        pass
    with batch.waiting():
        pass
    first, second = batch.waits
    assert first.ended <= batch.tasks[0].started <= batch.tasks[0].ended <= second.started


def test_figures_per_stage_and_over_all() -> None:
    stages = []
    for busy_s, batch_s, peak in ((6.0, 8.0, 3), (4.0, 7.0, 1)):
        interval = Interval()
        interval.add(make_batch(busy_s, batch_s, peak))
        interval.add(make_batch(busy_s, batch_s, 1))
        stages.append(interval.figures())
    metrics = report(stages, batches=2)
    expected = {
        # The stage that is done first still has its bubble until the last one is done.
        "bubble fraction": (0.25, 0.5, 0.375),
        "batch (ms)": (8000, 7000, 7500),
        "live peak": (3, 1, 3),
        "dispatch (us)": (2, 2, 2),
        "message wait (ms)": (2000, 3000, 2500),
        "message age (ms)": (250, 250, 250),
        "forward (ms)": (3000, 2000, 2500),
        "backward (ms)": (3000, 2000, 2500),
    }
    assert not any("agreement" in name for name in metrics)
    for name, (first, second, over_all) in expected.items():
        assert metrics[f"rrfp/{name}/stage 0"] == pytest.approx(first)
        assert metrics[f"rrfp/{name}/stage 1"] == pytest.approx(second)
        assert metrics[f"rrfp/{name}"] == pytest.approx(over_all)


def test_what_only_some_stages_have() -> None:
    first, second = Interval(), Interval()
    first.add(make_batch(1, 2, 1))
    second.add(make_batch(1, 2, 1))
    second.agreement_s = [40e-6]
    metrics = report([first.figures(), second.figures()], batches=1)
    assert metrics["rrfp/agreement (us)"] == pytest.approx(40)
    assert metrics["rrfp/agreement (us)/stage 1"] == pytest.approx(40)
    assert "rrfp/agreement (us)/stage 0" not in metrics


# Real trainings.

FLAGS = shlex.split(
    "--pipeline-model-parallel-size 2 --train-iters 4 --log-interval 2 --rrfp-hint bf"
    " --rrfp-live-limit 3 --eval-interval 2 --eval-iters 1"
)
NAMES = [
    "bubble fraction",
    "batch (ms)",
    "live peak",
    "dispatch (us)",
    "message wait (ms)",
    "message age (ms)",
    "forward (ms)",
    "backward (ms)",
]


def _watch(record: dict[str, Any]) -> None:
    from megatron_ext.pipeline.metrics import Metrics

    os.environ["WANDB_MODE"] = "offline"
    gather = Metrics.gather
    record["gathers"] = 0

    def counted(self: Metrics) -> dict[str, float]:
        record["gathers"] += 1
        return gather(self)

    Metrics.gather = counted  # type: ignore[method-assign]


@pytest.mark.multiprocess
def test_tensorboard_and_wandb_get_them(corpus: Path, tmp_path: Path) -> None:
    logging = ["--tensorboard-dir", str(tmp_path / "tensorboard")]
    logging += ["--wandb-project", "pipelines", "--wandb-exp-name", "two stages"]
    logging += ["--wandb-save-dir", str(tmp_path / "wandb")]
    records = train_well(corpus, 2, [*FLAGS, *RRFP, *logging], observe=_watch)
    assert [record["gathers"] for record in records] == [2, 2]
    for scalars in (
        _read_tensorboard(tmp_path / "tensorboard"),
        read_wandb_run(tmp_path / "wandb").scalars,
    ):
        mine = {name: points for name, points in scalars.items() if name.startswith("rrfp/")}
        places = ["", "/stage 0", "/stage 1"]
        assert sorted(mine) == sorted(f"rrfp/{name}{place}" for name in NAMES for place in places)
        for name, points in mine.items():
            assert [step for step, _ in points] == [2, 4], name
            assert all(math.isfinite(value) and value >= 0 for _, value in points)
        for _, fraction in mine["rrfp/bubble fraction"]:
            assert 0 < fraction < 1
        assert [value for _, value in mine["rrfp/live peak/stage 0"]] == [3, 3]
        assert [value for _, value in mine["rrfp/live peak/stage 1"]] == [1, 1]
        assert "lm loss" in scalars  # Megatron's own are there as ever


@pytest.mark.multiprocess
def test_ranks_that_decide_together(corpus: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--tensor-model-parallel-size", "2", "--rrfp-hint", "bfw"]
    train_well(corpus, 4, [*flags, *RRFP, "--tensorboard-dir", str(tmp_path)])
    scalars = _read_tensorboard(tmp_path)
    for name in ("agreement (us)", "weight (ms)"):
        assert [step for step, _ in scalars[f"rrfp/{name}/stage 0"]] == [2, 4]


@pytest.mark.multiprocess
def test_two_replicas_log_the_last_one(corpus: Path, tmp_path: Path) -> None:
    logging = ["--tensorboard-dir", str(tmp_path)]
    train_well(corpus, 4, [*FLAGS, *RRFP, *logging])
    scalars = _read_tensorboard(tmp_path)
    assert [step for step, _ in scalars["rrfp/bubble fraction/stage 1"]] == [2, 4]


@pytest.mark.multiprocess
def test_no_writer_no_hook(corpus: Path) -> None:
    (record, _) = train_well(corpus, 2, [*FLAGS, *RRFP])
    assert "megatron.training.training.training_log" not in record["hooks"]


def _read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(point.step, point.value) for point in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
