"""The family that is trained here: its members share TPP and tau, and a run goes on."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_family.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_family", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_family"] = module
    spec.loader.exec_module(module)
    return module


def test_members_share_their_controls(script: ModuleType) -> None:
    members = [script.Member(width, 64, 20.0, 16, 8e-3) for width in (64, 112, 176, 272)]
    assert 1e5 < members[0].params < 1.4e5
    assert 1.8e6 < members[-1].params < 2.1e6
    for member in members:
        tokens = member.iterations * member.batch * script.SEQUENCE_LENGTH
        assert tokens / member.params == pytest.approx(20, rel=0.05)
        tau = 1 / (member.hidden_lr * member.weight_decay * member.iterations)
        assert tau == pytest.approx(members[0].tau)
        assert not member.batch % 2


def test_wrong_flags_are_one_line(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--widths", "65"]) == 2
    error = capsys.readouterr().err
    assert "--widths" in error
    assert error.count("\n") == 1


@pytest.mark.multiprocess
def test_a_tiny_member_is_trained_once(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(sysconfig.get_path("stdlib")) / "asyncio"
    words = ["--out", str(tmp_path), "--text", str(text)]
    words += ["--widths", "16", "--tpp", "1", "--batch", "32"]
    assert script.main(words) == 0
    rows = list(csv.DictReader((tmp_path / "family.csv").open()))
    assert len(rows) == script.EVALUATIONS
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    assert json.loads((tmp_path / "family.json").read_text())["runs"] == []
    assert json.loads((tmp_path / "width-16.json").read_text())["final_loss"] > 0
    log = (tmp_path / "width-16.log").read_text()
    assert script.main(words) == 0
    assert (tmp_path / "width-16.log").read_text() == log
