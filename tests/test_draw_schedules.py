"""The picture in the README: both schedules are possible, and it is drawn without help."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "draw_schedules.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_schedules", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["draw_schedules"] = module
    spec.loader.exec_module(module)
    return module


def settings(**changes: Any) -> argparse.Namespace:
    values = {"stages": 4, "microbatches": 6, "sigma": 0.5, "hint": "bf", "live_limit": "2p"}
    return argparse.Namespace(**{**values, **changes})


@pytest.mark.parametrize(("hint", "kinds"), [("bf", 2), ("bfw", 3)])
def test_every_task_runs_once_after_what_it_needs(
    script: ModuleType, hint: str, kinds: int
) -> None:
    fixed, ready = script.compare(settings(hint=hint), seed=3)
    assert len(fixed) == 4 * 6 * 2
    assert len(ready) == 4 * 6 * kinds
    for spans in (fixed, ready):
        when = {(span.stage, span.task): span for span in spans}
        assert len(when) == len(spans)
        for (stage, task), span in when.items():
            needed = [(stage, task._replace(kind=kind)) for kind in range(task.kind)]
            if task.kind == script.FORWARD:
                needed.append((stage - 1, task))
            if task.kind == script.BACKWARD:
                needed.append((stage + 1, task))
            assert all(when[one].end <= span.start for one in needed if one in when)
        for one in spans:
            others = [two for two in spans if two.stage == one.stage and two is not one]
            assert all(two.end <= one.start or one.end <= two.start for two in others)


def test_equal_durations_make_equal_schedules(script: ModuleType) -> None:
    fixed, ready = script.compare(settings(sigma=0.0, live_limit="p"), seed=0)
    assert script.makespan(fixed) == script.makespan(ready) == (6 + 4 - 1) * 3


def test_it_writes_a_picture(script: ModuleType, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        path = tmp_path / "new" / name
        assert script.main(["--out", str(path), "--microbatches", "3", "--seeds", "3"]) == 0
    one, two = ((tmp_path / "new" / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert one == two
    shown = "".join(ElementTree.fromstring(one).itertext())
    for text in ("1F1B", "RRFP", "stage 3", "forward", "backward", "waiting"):
        assert text in shown
