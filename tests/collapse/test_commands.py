"""`megatron-ext collapse` as it is typed, on synthetic files and on the public curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext import cli
from megatron_ext.collapse.arrays import Floats
from tests.collapse import curves


def run(*words: object) -> int:
    return cli.main(["collapse", *map(str, words)])


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def write_run(file: Path, fault: Floats | float = 0.0, seed: int = 0, upto: float = 1.0) -> Path:
    t, losses = curves.run(points=1000, seed=seed, fault=fault)
    rates = 1e-3 * curves.SCHEDULE.at(t)
    lines = ["step,val_loss,lr,lr_peak,batch_tokens,params,weight_decay,total_steps"]
    for i in range(int(upto * t.size)):
        lines.append(f"{10 * (i + 1)},{losses[i]:.6f},{rates[i]:.6g},0.001,2e5,1e8,0.1,10000")
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    file = tmp_path / "reference.json"
    assert run("fit", write_run(tmp_path / "reference.csv", seed=9), "--out", file) == 0
    return file


def test_check_has_its_keys(
    tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t = curves.run(points=1000)[0]
    faulty = write_run(tmp_path / "run.csv", fault=0.01 * (t >= 0.6))
    found = run_json(capsys, "check", faulty, "--reference", reference)
    keys = {"comparable", "reasons", "predicted_final_loss", "interval", "mean_deviation", "alarms"}
    assert keys <= set(found)
    assert found["comparable"] is True
    (alarm,) = found["alarms"]
    assert {"t", "step", "kind", "size", "confidence"} <= set(alarm)
    assert 0.6 < alarm["t"] < 0.65
    assert alarm["step"] == pytest.approx(alarm["t"] * 10000, abs=30)
    before = run_json(capsys, "check", faulty, "--reference", reference, "--until", "0.5")
    assert before["alarms"] == []
    assert before["predicted_final_loss"] == pytest.approx(2.5, rel=0.003)
    assert before["interval"][0] < 2.5 < before["interval"][1]
    assert run("check", faulty, "--reference", reference, "--strict") == 3
    text = capsys.readouterr().out
    assert "ALARM" in text
    # A source is as good a reference as a curve file.
    again = run_json(capsys, "check", faulty, "--reference", tmp_path / "reference.csv")
    assert again["alarms"] == found["alarms"]


def test_an_unfinished_file_is_recognised(
    tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = write_run(tmp_path / "half.csv", upto=0.5)
    found = run_json(capsys, "check", half, "--reference", reference)
    assert found["fraction"] == pytest.approx(0.5)
    assert found["final_loss"] is None
    assert run("fit", half) == 2
    assert "needs the final loss" in capsys.readouterr().err


def test_other_controls_are_refused(
    tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path / "run.csv")
    words = ["check", file, "--reference", reference, "--params", "400M"]
    found = run_json(capsys, *words)
    assert found["comparable"] is False
    assert "TPP differs 4.00 times" in found["reasons"][0]
    assert found["mean_deviation"] is None
    assert run(*words, "--strict") == 4
    assert run_json(capsys, *words, "--force")["mean_deviation"] < 0.01


def test_predict_ranks(tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_run(tmp_path / "good.csv", upto=0.5)
    bad = tmp_path / "bad.csv"
    head, *rows = good.read_text().splitlines()
    cells = [row.split(",") for row in rows]
    worse = [",".join([c[0], f"{1.1 * float(c[1]):.6f}", *c[2:]]) for c in cells]
    bad.write_text("\n".join([head, *worse]))
    found = run_json(capsys, "predict", bad, good, "--reference", reference)["runs"]
    assert [Path(each["run"]).name for each in found] == ["good.csv", "bad.csv"]
    assert [each["stop"] for each in found] == [False, True]
    assert run("predict", bad, good, "--reference", reference) == 0
    assert "stop; if wrong" in capsys.readouterr().out


def test_fit_writes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write_run(tmp_path / f"{seed}.csv", seed=seed) for seed in (1, 2)]
    found = run_json(capsys, "fit", *files, "--out", tmp_path / "curves")
    assert [each["error"] < 0.002 for each in found["curves"]] == [True, True]
    assert found["family"]["notes"]
    assert "reason" in found["power_law"]
    assert len(found["written"]) == 2
    assert run("fit", *files, "--out", tmp_path / "curves") == 2
    assert "--force" in capsys.readouterr().err
    assert run("fit", *files, "--out", tmp_path / "curves", "--force") == 0
    assert "joint fit" in capsys.readouterr().out


def test_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "recipe", "--params", "300M", "--tokens", "6B")
    assert found["tau"] == pytest.approx(0.175, abs=0.001)
    assert found["flags"][found["flags"].index("--lr-decay-style") + 1] == "linear"
    assert run("recipe", "--params", "x", "--tokens", "1B") == 2
    assert "--params" in capsys.readouterr().err


def test_plot(tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path / "<b>&run.csv")
    picture, page = tmp_path / "p.png", tmp_path / "p.html"
    words = ["plot", file, "--reference", reference, "--out", picture, "--html", page]
    assert run(*words) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "&lt;b&gt;&amp;run.csv" in page.read_text()
    assert "<b>&run" not in page.read_text()
    capsys.readouterr()
    assert run(*words) == 2
    assert "exists; give another name, or --force to replace it" in capsys.readouterr().err
    assert run(*words, "--force") == 0
    assert run("plot", file, "--reference", reference) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check", "none.csv", "--reference", "REF"], "none.csv: no such file"),
        (["check", "RUN", "--reference", "none.json"], "none.json: no such file"),
        (["check", "RUN", "--reference", "REF", "--until", "2"], "--until 2.0"),
        (["check", "RUN", "--reference", "REF", "--window", "x"], "--window 'x'"),
        (["check", "RUN", "--reference", "REF", "--window", "0.9-0.1"], "window"),
        (["check", "RUN", "--reference", "REF", "--where", "size"], "--where"),
        (["check", "RUN", "--reference", "REF", "--false-alarm-rate", "2"], "false-alarm rate"),
        (["check", "RUN", "--reference", "REF", "--params", "-"], "--params"),
        (["check", "RUN", "--reference", "REF", "--schedule", "square"], "square"),
        (["check", "RUN", "--reference", "REF", "--expected-final-loss", "x"], "power-law"),
        (["check", "RUN", "--reference", "REF", "--smooth", "0"], "--smooth"),
        (["check", "RUN", "--reference", "REF", "--total-steps", "5"], "beyond the given end"),
    ],
)
def test_one_line_errors(
    tmp_path: Path,
    reference: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    places = {"RUN": str(write_run(tmp_path / "run.csv")), "REF": str(reference)}
    capsys.readouterr()
    assert run(*(places.get(word, word) for word in words)) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_the_public_family(capsys: pytest.CaptureFixture[str]) -> None:
    file = curves.public("olmo_ladder.csv")
    words = ["check", file, "--column", "loss_c4", "--reference", file]
    words += ["--reference-where", "size=190M,budget=2xC", "--where", "size=760M,budget=2xC"]
    whole = run_json(capsys, *words)
    assert whole["comparable"] is True
    assert whole["alarms"] == []
    assert 0.0003 < whole["mean_deviation"] < 0.0026
    half = run_json(capsys, *words, "--until", "0.5")
    assert half["predicted_final_loss"] == pytest.approx(3.104255, rel=0.005)
    assert half["provisional"] is False


def test_the_reference_may_be_the_same_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = curves.public("olmo_ladder.csv")
    words = ["check", file, "--column", "loss_pile", "--reference", file]
    found = run_json(capsys, *words, "--where", "size=760M,budget=5xC")
    assert "size=190M" in found["reference"]
    assert "budget=5xC" in found["reference"]
    assert found["comparable"] is True


def test_public_runs_that_do_not_collapse(capsys: pytest.CaptureFixture[str]) -> None:
    file = curves.public("multipowerlaw.csv")
    where = "size={},schedule=cosine_24000"
    words = ["check", file, "--where", where.format("25M"), "--reference", file]
    found = run_json(capsys, *words, "--reference-where", where.format("100M"))
    assert found["comparable"] is False
    assert found["reasons"]


def test_public_noisy_training_losses(capsys: pytest.CaptureFixture[str]) -> None:
    file = curves.public("linear_to_zero_124m.csv")
    words = ["check", file, "--where", "run=lr0.001,split=train", "--reference", file]
    found = run_json(capsys, *words, "--reference-where", "run=lr0.001,split=val")
    assert found["alarms"] == []
    assert any("restart" in note for note in found["notes"])
    assert np.isfinite(found["mean_deviation"])
