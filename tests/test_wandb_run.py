"""What a real training leaves in a real offline wandb run."""

from __future__ import annotations

import math
import os
import re
import shlex
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext import __version__, wandb_run, wandb_workspace
from megatron_ext.collapse.alarm import Alarm
from megatron_ext.collapse.megatron_loop import sent_alerts
from megatron_ext.errors import UsageError
from tests.collapse.test_training import fault_from, flags, reference
from tests.test_arguments import parse
from tests.training import RRFP, train, train_well
from tests.wandb_file import read_wandb_run

__all__ = ["reference"]

KEY = "marker" * 8
DELAYED = shlex.split(
    "--pipeline-model-parallel-size 2 --num-layers 4 --train-iters 8 --log-interval 2"
    " --pipedream-2bw --pipedream-2bw-clip stage --collapse-window 0.1-0.3 --eval-interval 1000"
    " --log-throughput --log-timers-to-tensorboard"
)


def with_a_key(record: dict[str, Any]) -> None:
    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_API_KEY"] = KEY


def wandb_flags(folder: Path) -> list[str]:
    return [
        *("--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", str(folder)),
        *("--tensorboard-dir", str(folder / "tensorboard")),
    ]


@pytest.mark.multiprocess
def test_a_run_with_everything(
    corpus: Path,
    tmp_path: Path,
    reference: Path,
) -> None:
    traced = ["--rrfp-trace", str(tmp_path / "trace")]
    words = [*flags(reference), *DELAYED, *RRFP, *traced, *wandb_flags(tmp_path)]
    ranks, records = train(corpus, 2, words, observe=with_a_key)
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[1].output
    run = read_wandb_run(tmp_path)
    assert run.ended
    # Every panel of the dashboard shows something.
    for part in wandb_workspace.PARTS:
        for panel in part.panels:
            for name in panel.metrics:
                if name == "rrfp/agreement (us)":  # ranks that share collectives only
                    continue
                assert name in run.scalars, (part.name, name)
            if panel.regex is not None:
                shown = [name for name in run.scalars if re.search(panel.regex, name)]
                assert len(shown) == 2, panel
    # Two weight versions: a step late, each stage with a norm of its own.
    assert {value for _, value in run.scalars["pipedream-2bw/version lag (updates)"]} == {1}
    norms = [run.scalars[f"pipedream-2bw/grad norm/stage {stage}"] for stage in (0, 1)]
    assert norms[0] != norms[1]
    for _, wait in run.scalars["pipedream-2bw/update wait (ms)"]:
        assert wait >= 0
    latencies = dict(run.scalars["pipedream-2bw/update latency (ms)"])
    for step, wait in run.scalars["pipedream-2bw/update wait (ms)"]:
        assert wait <= latencies[step]
    # The summary says what the intervals said.
    fractions = [value for _, value in run.scalars["rrfp/bubble fraction"]]
    assert run.summary["rrfp/mean bubble fraction"] == pytest.approx(statistics.fmean(fractions))
    assert run.summary["rrfp/measured iterations"] == 8
    assert run.summary["pipedream-2bw/delayed iterations"] == 8
    peaks = [value for _, value in run.scalars["rrfp/live peak"]]
    assert run.summary["rrfp/peak live"] == max(peaks) == max(r["peak_live"] for r in records)
    assert run.summary["collapse/alarms"] == 0
    assert run.summary["collapse/compared with"] == "a finished run"
    predicted = run.scalars["collapse/predicted final loss"][-1][1]
    assert run.summary["collapse/predicted final loss"] == predicted
    # Settings with their defaults, beside Megatron's arguments.
    ours = run.config["megatron_ext"]
    assert ours["version"] == __version__
    assert ours["rrfp"]["hint"] == "bfw-pieces"
    assert ours["rrfp"]["live_limit"] == "p"
    assert ours["pipedream_2bw"]["clip"] == "stage"
    assert ours["collapse"]["window"] == [0.1, 0.3]
    assert run.config["num_layers"] == 4
    assert run.tags == ("rrfp", "bfw-pieces", "2bw", "collapse")
    # The key is nowhere.
    for rank in ranks:
        assert KEY not in rank.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".wandb", ".json", ".log"}
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path


def test_a_run_of_megatrons_alone_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    train_well(corpus, 1, ["--train-iters", "2", *wandb_flags(tmp_path)], observe=with_a_key)
    run = read_wandb_run(tmp_path)
    assert run.tags == ()
    assert "megatron_ext" not in run.config
    assert not [name for name in (*run.summary, *run.scalars) if name.startswith("rrfp")]


def test_an_alert_is_sent_once_also_over_a_restart(
    corpus: Path,
    tmp_path: Path,
    reference: Path,
) -> None:
    folder = tmp_path / "save"
    save = f"--save {folder} --load {folder} --save-interval 14 --ckpt-format torch".split()
    words = [*flags(reference, *save), "--collapse-action", "alert"]
    observe = fault_from(15, float("nan"))
    # It dies at iteration 20, after the alert and long after its checkpoint.
    first = [*words, "--exit-interval", "20", *wandb_flags(tmp_path / "first")]
    ranks, _ = train(corpus, 1, first, observe=observe)
    assert "ALARM: nan at step 16" in ranks[0].output
    run = read_wandb_run(tmp_path / "first")
    assert [title for title, _ in run.alerts] == ["collapse: nan"]
    assert run.summary["collapse/alarms"] == 1
    assert run.summary["collapse/first alarm at iteration"] == 16
    assert run.summary["collapse/last alarm"].startswith("nan at step 16")
    (folder / "latest_checkpointed_iteration.txt").write_text("14")
    ranks, _ = train(corpus, 1, [*words, *wandb_flags(tmp_path / "second")], observe=observe)
    assert ranks[0].exit_code == 0
    assert "statistics go on from iteration 14" in ranks[0].output
    assert "ALARM: nan at step 16" in ranks[0].output
    assert read_wandb_run(tmp_path / "second").alerts == []
    # Another run in the same folder is another run.
    alarm = Alarm(0.7, 16, "nan", math.inf, 1.0, 0.7, 16)
    assert sent_alerts(SimpleNamespace(save=str(folder), iteration=14)).has(alarm, 1)
    assert not sent_alerts(SimpleNamespace(save=str(folder), iteration=0)).has(alarm, 1)
    assert not sent_alerts(SimpleNamespace(save=str(folder), iteration=14)).has(alarm, 1)


def test_a_summary_goes_on_with_that_of_the_run_before() -> None:
    summary: dict[str, Any] = {}
    first = wandb_run.PipelineSummary(summary)
    first.take({"rrfp/bubble fraction": 0.2, "rrfp/live peak": 4, "rrfp/batch (ms)": 10}, 10)
    first.take({"rrfp/bubble fraction": 0.5, "rrfp/live peak": 3, "rrfp/batch (ms)": 40}, 5)
    assert summary["rrfp/mean bubble fraction"] == pytest.approx(0.3)
    second = wandb_run.PipelineSummary(summary)
    second.take({"rrfp/bubble fraction": 0.6, "rrfp/live peak": 2, "rrfp/batch (ms)": 20}, 15)
    assert summary["rrfp/mean bubble fraction"] == pytest.approx(0.45)
    assert summary["rrfp/mean batch (ms)"] == pytest.approx(20)
    assert summary["rrfp/measured iterations"] == 30
    assert summary["rrfp/peak live"] == 4
    assert "pipedream-2bw/mean update wait (ms)" not in summary


def test_a_long_name_of_a_hint_is_cut_for_its_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "x" * 80
    source = "from megatron_ext.pipeline.hints import BackwardForward\nMine = BackwardForward\n"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    args = parse("--pipeline-schedule", "rrfp", "--rrfp-hint", f"{module}:Mine")
    assert wandb_run.tags(args) == ("rrfp", "x" * 64)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"wandb_exp_name": ""}, "add --wandb-exp-name NAME"),
        ({"wandb_save_dir": "", "save": None}, "add --wandb-save-dir DIR, or --save DIR"),
    ],
)
def test_flags_that_wandb_needs(given: dict[str, Any], missing: str) -> None:
    whole = {"wandb_project": "p", "wandb_exp_name": "e", "wandb_save_dir": "d", "save": None}
    wandb_run.check(parse(**whole))
    wandb_run.check(parse(**{**whole, **given, "wandb_project": ""}))
    with pytest.raises(UsageError, match=missing):
        wandb_run.check(parse(**{**whole, **given}))
