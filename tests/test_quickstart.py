"""The quickstart's verdict, and how it fails."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ext.corpus import CorpusSummary
from megatron_ext.training_log import IterationReport

SCRIPT = Path(__file__).parent.parent / "scripts" / "quickstart.py"

CORPUS = CorpusSummary(
    prefix="corpus",
    documents=1,
    tokens=1,
    skipped_binary=0,
    skipped_unreadable=0,
    megatron_version="0.19.2",
    megatron_flags=("--data-path", "corpus"),
)

RUN = [
    IterationReport(iteration=1, loss=5.785645, grad_norm=8.122, time_ms=783.6),
    IterationReport(iteration=2, loss=5.581790, grad_norm=3.364, time_ms=690.0),
    IterationReport(iteration=3, loss=5.111679, grad_norm=2.019, time_ms=587.4),
]


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module
    spec.loader.exec_module(module)
    return module


def test_equal_numbers_are_identical_whatever_the_times(quickstart: ModuleType) -> None:
    rrfp = [dataclasses.replace(report, time_ms=report.time_ms / 2) for report in RUN]
    summary = quickstart.summarize(RUN, rrfp)
    assert summary["identical"] is True
    assert summary["median_time_ms"] == {"megatron": 690.0, "rrfp": 345.0}
    assert summary["iterations"][0] == {
        "iteration": 1,
        "megatron": {"loss": 5.785645, "grad_norm": 8.122, "time_ms": 783.6},
        "rrfp": {"loss": 5.785645, "grad_norm": 8.122, "time_ms": 391.8},
        "identical": True,
    }


@pytest.mark.parametrize("change", [{"loss": 5.581791}, {"grad_norm": 3.365}, {"loss": None}])
def test_one_different_number_is_found(
    quickstart: ModuleType, change: dict[str, float | None]
) -> None:
    rrfp = [RUN[0], dataclasses.replace(RUN[1], **change), RUN[2]]
    summary = quickstart.summarize(RUN, rrfp)
    assert summary["identical"] is False
    assert [row["identical"] for row in summary["iterations"]] == [True, False, True]


def test_two_runs_that_both_fail_to_train_are_not_identical(quickstart: ModuleType) -> None:
    broken = [dataclasses.replace(report, grad_norm=math.inf) for report in RUN]
    summary = quickstart.summarize(broken, broken)
    assert summary["identical"] is False
    json.dumps(summary, allow_nan=False)


def test_a_failed_run_shows_the_cause_and_the_log(
    quickstart: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = (
        "import sys\n"
        "for i in range(100): print('line', i)\n"
        "print('the cause')\n"
        "print('E1130 torch/distributed/elastic/multiprocessing/api.py: failed')\n"
        "sys.exit(3)\n"
    )
    monkeypatch.setattr(quickstart, "_command", lambda *_: (sys.executable, "-c", script))
    with pytest.raises(quickstart.RunError, match=r"ended with status 3; .*rrfp\.log"):
        quickstart.train(quickstart.RRFP, CORPUS, tmp_path, 40)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == quickstart.LOG_TAIL
    assert shown[-1] == "the cause"
    assert "line 0\n" in (tmp_path / "rrfp.log").read_text()


def test_a_run_that_falls_silent_is_stopped(
    quickstart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import time; print('still here', flush=True); time.sleep(600)"
    monkeypatch.setattr(quickstart, "_command", lambda *_: (sys.executable, "-c", script))
    monkeypatch.setattr(quickstart, "SILENCE_LIMIT", 2.0)
    with pytest.raises(quickstart.RunError, match="printed nothing for 2 s"):
        quickstart.train(quickstart.MEGATRON, CORPUS, tmp_path, 40)


def test_a_run_that_stops_early_is_no_success(quickstart: ModuleType, tmp_path: Path) -> None:
    line = (
        " [2026-11-30 20:51:24.357766] iteration        1/      40 | consumed samples:"
        "           32 | elapsed time per iteration (ms): 783.6 | learning rate: 2.995838E-03 |"
        " global batch size:    32 | lm loss: 5.785645E+00 | loss scale: 1.0 | grad norm: 8.122 |"
    )
    with pytest.raises(quickstart.RunError, match="reported 1 iterations instead of 2"):
        quickstart._complete_reports(quickstart.MEGATRON, [line], 2, tmp_path)
