"""A stranger's mistakes: each ends in one line that says what to do. Every run here is real."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import __main__, cli, python_version, start_checks
from megatron_ext.errors import UsageError
from tests.test_main import ENTRY, SCRIPT, last_line, run
from tests.training import REPOSITORY, RRFP, train

PIPELINE = ["--pipeline-model-parallel-size", "2", *RRFP]
WANDB = ["--wandb-project", "p", "--wandb-save-dir", "FOLDER"]


def _as_a_stranger(home: str, without: Sequence[str], record: dict[str, Any]) -> None:
    """Nobody is logged in here, and some packages are not installed."""
    for name in [name for name in os.environ if "WANDB" in name]:
        del os.environ[name]
    os.environ["HOME"] = home
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in without else find_spec(name, package)

    importlib.util.find_spec = find


@pytest.mark.parametrize(
    ("processes", "flags", "without", "said"),
    [
        (1, RRFP, (), "--pipeline-model-parallel-size is 1, the least is 2"),
        (1, [*PIPELINE], (), "Megatron refuses these flags: world size (1) is not divisible"),
        (2, [*PIPELINE, "--rrfp-transport", "nixl"], ("nixl",), "is not installed: pip install"),
        (2, [*PIPELINE, "--rrfp-transport", "nccl"], (), "nccl needs a GPU; on CPU use gloo or"),
        (2, [*PIPELINE, "--num-layers", "3"], (), "Megatron refuses these flags: Number of layers"),
        (1, ["--collapse-reference", "none.json"], (), "none.json: no such file; megatron-ext"),
        (1, [*WANDB, "--wandb-exp-name", "e"], (), "(No API key configured): type `wandb login`"),
        (1, WANDB, (), "--wandb-project needs a name for this run: add --wandb-exp-name NAME"),
        (1, ["--data-path", "/none"], (), "--data-path /none: there is no /none.bin and /none.idx"),
    ],
)
def test_a_run_that_cannot_start(
    processes: int,
    flags: list[str],
    without: tuple[str, ...],
    said: str,
    corpus: Path,
    tmp_path: Path,
) -> None:
    flags = [flag.replace("FOLDER", str(tmp_path)) for flag in flags]
    observe = functools.partial(_as_a_stranger, str(tmp_path), without)
    ranks, _ = train(corpus, processes, flags, observe=observe)
    for rank in ranks:
        assert said in rank.error_line
        assert rank.output.splitlines()[-1] == rank.error_line
        assert "Traceback" not in rank.output
        assert rank.exit_code == 2


def an_old_python() -> str:
    """One that starts: version managers leave names behind that do not."""
    for name in ("python3.11", "python3.10", "python3.9"):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    pytest.skip("no older Python here")


@pytest.mark.parametrize("module", ["megatron_ext", "megatron_ext.cli"])
def test_a_python_that_is_too_old(module: str) -> None:
    words = ["script.py"] if module == "megatron_ext" else ["collapse", "fit"]
    done = subprocess.run(
        [an_old_python(), "-m", module, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "is too old: use 3.12 or newer" in line


def test_the_same_without_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    with pytest.raises(UsageError, match=r"use 3\.12 or newer"):
        python_version.check_python()
    assert cli.main(["collapse", "fit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "use 3.12 or newer" in line


def test_another_apex_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('pyramid')")
    (tmp_path / "mine.py").write_text("print('ran')")
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    done = subprocess.run(
        [*ENTRY, "--cpu", str(tmp_path / "mine.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    (line,) = [line for line in done.stderr.splitlines() if "apex" in line]
    assert line.startswith("megatron_ext: warning: the installed apex is not NVIDIA's")
    assert line.endswith("pip uninstall apex")


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[tuple[str, int]] = []

    def end(message: str, code: int) -> None:
        said.append((message, code))
        raise SystemExit(code)

    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(__main__, "end", end)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit):
        __main__.main(["--cpu", str(tmp_path / "mine.py")])
    ((message, code),) = said
    assert code == 2
    assert "install megatron_ext with what it needs; megatron-ext doctor says more" in message


def test_our_flags_before_the_script() -> None:
    process = run(*ENTRY, "--pipeline-schedule", "rrfp", SCRIPT)
    assert process.returncode == 2
    assert "unrecognized arguments: --pipeline-schedule" in last_line(process)


@pytest.mark.parametrize(
    ("path", "is_there"),
    [
        (["data"], True),
        (["0.3", "data", "0.7", "s3://bucket/data"], True),
        (["data.bin"], True),
        (["0.3", "data", "0.7", "other"], False),
        (None, True),
    ],
)
def test_data_paths(path: list[str] | None, is_there: bool, tmp_path: Path) -> None:
    (tmp_path / "data.bin").touch()
    places = path and [str(tmp_path / word) if word[0] in "do" else word for word in path]
    args = Namespace(data_path=places)
    if is_there:
        start_checks.check_data(args)
        return
    with pytest.raises(UsageError, match=r"--data-path .*other: there is no .*other\.bin"):
        start_checks.check_data(args)


@pytest.mark.parametrize("error", [AssertionError("x"), AssertionError(), ValueError("y")])
def test_another_error_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    assert start_checks.refused_flags(caught.value) is None
