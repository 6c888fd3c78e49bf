"""The watch inside Megatron's real training loop, on CPU."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.arguments import COLLAPSE_EXIT_CODE
from megatron_ext.collapse.controls import Controls
from megatron_ext.collapse.curve import Curve
from megatron_ext.collapse.curve_file import write_curve
from megatron_ext.collapse.schedule import NamedSchedule
from tests.pipeline.test_metrics import _read_tensorboard
from tests.ranks import Rank
from tests.training import RRFP, train, train_well
from tests.wandb_file import read_wandb_run

ITERATIONS = 24
NAMES = {"normalized loss", "reference", "residual", "predicted final loss", "alarm"}


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A curve of some shape: the controls are not stated, so nothing is refused."""
    t = np.linspace(0.01, 1, 100)
    curve = Curve("a finished run", final_loss=4.0, t=t, l=1 + 0.4 * (t**-0.2 - 1))
    write_curve(curve, tmp_path / "reference.json")
    return tmp_path / "reference.json"


def flags(reference: Path, *more: str) -> list[str]:
    return [
        *("--train-iters", str(ITERATIONS), "--log-interval", "2", "--num-layers", "2"),
        *("--eval-interval", "12", "--eval-iters", "1"),
        *("--collapse-reference", str(reference), "--collapse-window", "0.1-0.5"),
        *more,
    ]


def fault_from(iteration: int, factor: float) -> Callable[[dict[str, Any]], None]:
    """Make Megatron's training steps report a loss that is wrong from an iteration on."""
    return functools.partial(_plant, iteration, factor)


def _plant(iteration: int, factor: float, record: dict[str, Any]) -> None:
    from megatron.training import training

    train_step = training.train_step

    def faulty(*args: Any, **named: Any) -> Any:
        losses, *rest = train_step(*args, **named)
        if named["iteration"] >= iteration:
            losses = {name: value * factor for name, value in losses.items()}
        return (losses, *rest)

    training.train_step = faulty
    os.environ["WANDB_MODE"] = "offline"


def keep_states(record: dict[str, Any]) -> None:
    """Record the watch's state at the end of training, and what it said."""
    from megatron_ext.collapse.callback import CollapseCallback

    end = CollapseCallback.on_train_end

    def keep(self: CollapseCallback, context: object = None) -> None:
        end(self, context)
        record["state"] = self.state()

    CollapseCallback.on_train_end = keep  # type: ignore[method-assign]


def test_tensorboard_and_wandb_get_the_metrics(
    corpus: Path, tmp_path: Path, reference: Path
) -> None:
    logging = ["--tensorboard-dir", str(tmp_path / "tensorboard")]
    logging += ["--wandb-project", "p", "--wandb-exp-name", "e"]
    logging += ["--wandb-save-dir", str(tmp_path / "wandb")]
    train_well(corpus, 1, flags(reference, *logging), observe=fault_from(99, 1.0))
    run = read_wandb_run(tmp_path / "wandb")
    for scalars in (_read_tensorboard(tmp_path / "tensorboard"), run.scalars):
        mine = {name for name in scalars if name.startswith("collapse/")}
        assert mine == {f"collapse/{name}" for name in NAMES}
        steps = [step for step, _ in scalars["collapse/reference"]]
        assert steps == list(range(2, ITERATIONS + 1, 2))
        assert scalars["collapse/reference"][-1][1] == pytest.approx(1.0)
        final = scalars["collapse/predicted final loss"][-1][1]
        losses = dict(scalars["lm loss"])
        assert final == pytest.approx(losses[ITERATIONS], rel=0.1)


@pytest.mark.multiprocess
def test_with_rrfp_only_the_last_rank_watches(
    corpus: Path, tmp_path: Path, reference: Path
) -> None:
    more = ["--pipeline-model-parallel-size", "2", "--num-layers", "4", *RRFP]
    ranks, records = train(corpus, 2, flags(reference, *more), observe=keep_states)
    assert [rank.exit_code for rank in ranks] == [0, 0]
    assert ["state" in record for record in records] == [False, True]
    assert "the loss is compared with a finished run" in ranks[1].output


def test_a_resumed_run_continues_the_same_statistics(
    corpus: Path, tmp_path: Path, reference: Path
) -> None:
    (whole,) = train_well(corpus, 1, flags(reference), observe=keep_states)
    folder = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    folder += ["--save-interval", "14", "--ckpt-format", "torch"]
    ranks, _ = train(corpus, 1, flags(reference, *folder, "--exit-interval", "14"))
    assert ranks[0].exit_code == 0, ranks[0].output
    file = tmp_path / "save" / "iter_0000014" / "collapse.json"
    assert json.loads(file.read_text())["version"] == 1
    ranks, (resumed,) = train(corpus, 1, flags(reference, *folder), observe=keep_states)
    assert "statistics go on from iteration 14" in ranks[0].output
    assert whole["steps"][14:] == resumed["steps"]
    # The restart is on the timeline of one of them.
    assert resumed["state"]["timeline"] == [
        [14, "restart from a checkpoint"],
        *whole["state"]["timeline"],
    ]
    for name in ("binner", "monitor", "fast", "watch", "alarms"):
        assert resumed["state"][name] == whole["state"][name], name


def test_a_resumed_run_without_statistics_says_so(
    corpus: Path, tmp_path: Path, reference: Path
) -> None:
    folder = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    folder += ["--save-interval", "4", "--ckpt-format", "torch", "--exit-interval", "4"]
    without = ["--train-iters", str(ITERATIONS), "--num-layers", "2", *folder]
    ranks, _ = train(corpus, 1, without)
    assert ranks[0].exit_code == 0, ranks[0].output
    ranks, _ = train(corpus, 1, flags(reference, *folder[:-2]))
    assert ranks[0].exit_code == 0
    assert "no statistics in the checkpoint of iteration 4" in ranks[0].output


def train_into_a_nan(corpus: Path, folder: Path, reference: Path, action: str) -> list[Rank]:
    """With checkpoints into `folder`, which only the alarm, or the end, saves."""
    more = f"--collapse-action {action} --save {folder} --save-interval 99 --ckpt-format torch"
    observe = fault_from(17, float("nan"))
    ranks, _ = train(corpus, 1, flags(reference, *more.split()), observe=observe)
    return ranks


def test_stop_saves_and_ends_with_its_own_exit_code(
    corpus: Path, tmp_path: Path, reference: Path
) -> None:
    ranks = train_into_a_nan(corpus, tmp_path, reference, "stop")
    assert ranks[0].exit_code == COLLAPSE_EXIT_CODE
    assert "ALARM: nan at step 18" in ranks[0].output
    assert (tmp_path / "iter_0000018" / "collapse.json").is_file()
    assert not re.search(r"iteration +20/", ranks[0].output)


def test_checkpoint_saves_once_and_goes_on(corpus: Path, tmp_path: Path, reference: Path) -> None:
    ranks = train_into_a_nan(corpus, tmp_path, reference, "checkpoint")
    assert ranks[0].exit_code == 0
    saved = sorted(folder.name for folder in tmp_path.glob("iter_*"))
    assert saved == ["iter_0000018", f"iter_{ITERATIONS:07d}"]


def test_an_alarm_by_default_only_speaks(corpus: Path, tmp_path: Path, reference: Path) -> None:
    logging = ["--tensorboard-dir", str(tmp_path / "tensorboard")]
    observe = fault_from(17, float("nan"))
    ranks, _ = train(corpus, 1, flags(reference, *logging), observe=observe)
    assert ranks[0].exit_code == 0
    assert ranks[0].output.count("ALARM:") == 1
    alarms = dict(_read_tensorboard(tmp_path / "tensorboard")["collapse/alarm"])
    assert alarms[16] == 0
    assert alarms[18] == 1


def test_a_reference_with_other_controls_is_refused(corpus: Path, tmp_path: Path) -> None:
    t = np.linspace(0.01, 1, 100)
    controls = Controls(given_tpp=20.0, schedule=NamedSchedule("constant"))
    curve = Curve("another run", controls=controls, final_loss=4.0, t=t, l=1 + (1 - t))
    write_curve(curve, tmp_path / "other.json")
    ranks, _ = train(corpus, 1, flags(tmp_path / "other.json", "--train-iters", "4"))
    assert ranks[0].exit_code == 0
    (line,) = [line for line in ranks[0].output.splitlines() if "not comparable" in line]
    assert "TPP differs" in line
    assert "schedule" in line
    ranks, _ = train(
        corpus, 1, flags(tmp_path / "other.json", "--train-iters", "4", "--collapse-force")
    )
    assert "the loss is compared with another run" in ranks[0].output


def test_a_missing_reference_is_a_usage_error(corpus: Path, tmp_path: Path) -> None:
    ranks, _ = train(corpus, 1, flags(tmp_path / "none.json"))
    assert ranks[0].exit_code == 2
    assert "none.json" in ranks[0].output


def test_without_the_flag_megatron_is_its_own(corpus: Path) -> None:
    (record,) = train_well(corpus, 1, ["--train-iters", "1"])
    assert record["hooks"] == [name for name in record["hooks"] if "collapse" not in name]
    assert "megatron.training.training.train" not in record["hooks"]
