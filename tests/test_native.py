"""What a patched Megatron calls: one line per error, and no patches of another interface."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megatron_ext import hooks, native
from megatron_ext.errors import PipelineError, UsageError
from megatron_ext.hook import Hook

REPOSITORY = Path(__file__).parent.parent


class Ended(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture(autouse=True)
def _end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)


def put_extensions(monkeypatch: pytest.MonkeyPatch, interface: int) -> None:
    """Pretend that the Megatron carries patches; nothing of a real one is imported."""
    for name in ("megatron", "megatron.training", "megatron.training.extensions"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.training.extensions"].INTERFACE = interface  # type: ignore[attr-defined]


def test_flags_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    put_extensions(monkeypatch, native.INTERFACE)
    args = native.add_arguments(argparse.ArgumentParser()).parse_args(["--pipedream-2bw"])
    assert args.pipedream_2bw
    assert args.pipeline_schedule == "megatron"


def test_patches_of_another_interface_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_extensions(monkeypatch, native.INTERFACE + 1)
    with pytest.raises(Ended, match="2"):
        native.add_arguments(argparse.ArgumentParser())
    (line,) = capsys.readouterr().err.splitlines()
    assert "reverse them and apply those of this one" in line


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("no such flag"), 2), (PipelineError("lost stage 1"), 1)]
)
def test_an_error_of_ours_is_one_line(
    error: Exception, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Ended, match=str(code)):
        native._end_by_uncaught(type(error), error, None)
    assert capfd.readouterr().err == f"megatron_ext: error: {error}\n"


def test_another_error_keeps_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    error = ValueError("of Megatron")
    with pytest.raises(Ended, match="1"):
        native._end_by_uncaught(ValueError, error, None)
    *_, traceback, line = capfd.readouterr().err.splitlines()
    assert traceback == "ValueError: of Megatron"
    assert line == "megatron_ext: error: rank 0: ValueError: of Megatron"


def test_errors_are_left_alone_until_a_flag_asks_for_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", before)
    asked: list[Hook] = []
    monkeypatch.setattr(hooks, "configure", lambda _: None)
    monkeypatch.setattr(native, "installed", lambda: list(asked))
    args = argparse.Namespace(allow_untested_megatron=True)
    native.configure(args)
    assert sys.excepthook is before
    monkeypatch.setattr(hooks, "configure", lambda _: asked.extend(hooks.RRFP_HOOKS))
    monkeypatch.setattr(native, "check_version", lambda _: None)
    native.configure(args)
    assert sys.excepthook is native._end_by_uncaught


def test_a_process_ends_by_it() -> None:
    program = """
import sys, threading
import torch.distributed
from megatron_ext import native
from megatron_ext.errors import PipelineError

sys.excepthook = native._end_by_uncaught
store = torch.distributed.HashStore()  # PyTorch now puts a hook of its own around ours
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
assert sys.excepthook is not native._end_by_uncaught
threading.Thread(target=threading.Event().wait).start()  # would keep the process alive
raise PipelineError("lost")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    assert (done.returncode, done.stderr) == (1, "megatron_ext: error: lost\n")
