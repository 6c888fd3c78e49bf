"""`scripts/apply_patches.sh` on Megatron's real sources: all, or nothing and one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.compatibility.sources import VERSIONS, sources
from tests.training import REPOSITORY

pytestmark = pytest.mark.compatibility

PATCHED_FILE = Path("megatron/core/pipeline_parallel/schedules.py")


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [REPOSITORY / "scripts" / "apply_patches.sh", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def refusal(*words: object, status: int = 1) -> str:
    done = run(*words)
    assert done.returncode == status, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("apply_patches: error: ")
    return line


def copy_of(version: str, folder: Path) -> Path:
    """The files that patches touch, and their folders' others; quick to compare."""
    whole = sources(version)
    for part in ("megatron/training", "megatron/core/pipeline_parallel"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(whole / part, folder / part, ignore=ignored)
    shutil.copy(whole / "megatron/core/package_info.py", folder / "megatron/core")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("version", VERSIONS)
def test_in_and_out_again(version: str, tmp_path: Path) -> None:
    megatron = copy_of(version, tmp_path)
    before = contents(megatron)
    outcomes = []
    for words in ("--check", "", "", "--check", "--reverse", "--reverse", "--check"):
        done = run("--megatron", megatron, *words.split())
        assert not done.stderr
        outcomes.append((done.returncode, done.stdout.split(":")[0]))
        if words == "--check":
            assert (contents(megatron) == before) == (done.returncode == 1)
    assert outcomes == [
        (1, "not applied, would fit"),
        (0, "applied 3 patches"),
        (0, "already applied"),
        (0, "applied"),
        (0, "reversed 3 patches"),
        (0, "not applied"),
        (1, "not applied, would fit"),
    ]
    assert contents(megatron) == before


def test_in_a_checkout(tmp_path: Path) -> None:
    megatron = copy_of(VERSIONS[-1], tmp_path)
    git(megatron, "init", "-q")
    git(megatron, "add", "-A")
    git(megatron, "commit", "-qm", "all")
    file = megatron / "megatron/training/arguments.py"
    text = file.read_text()
    file.write_text(text + "# mine\n")
    before = contents(megatron)
    assert "uncommitted changes: commit or stash them" in refusal("--megatron", megatron)
    assert contents(megatron) == before
    file.write_text(text)
    assert run("--megatron", megatron).returncode == 0
    assert "already applied" in run("--megatron", megatron).stdout
    git(megatron, "add", "-A")
    git(megatron, "commit", "-qm", "patched")
    assert run("--megatron", megatron, "--reverse").returncode == 0
    git(megatron, "diff", "--exit-code", "HEAD~", "--", "megatron/training/arguments.py")


def test_below_another_repository(tmp_path: Path) -> None:
    """Git would take paths from the top of that repository, and skip all files in silence."""
    git(tmp_path, "init", "-q")
    megatron = copy_of(VERSIONS[-1], tmp_path / "inner")
    done = run("--megatron", megatron)
    assert done.returncode == 0
    assert "schedule_registry" in (megatron / PATCHED_FILE).read_text()


def test_half_patched_or_edited_is_left_alone(tmp_path: Path) -> None:
    megatron = copy_of(VERSIONS[-1], tmp_path)
    (megatron / "megatron/training/callbacks.py").write_text("mine = True\n")
    before = contents(megatron)
    line = refusal("--megatron", megatron)
    assert "megatron/training/callbacks.py: already exists" in line
    assert "only some of the patches" in refusal("--megatron", megatron, "--reverse")
    assert contents(megatron) == before


def test_what_cannot_be_patched_is_named(tmp_path: Path) -> None:
    assert "--megatron DIR" in refusal(status=2)
    assert "no megatron/core/package_info.py" in refusal("--megatron", tmp_path, status=2)
    assert "--frobnicate" in refusal("--frobnicate", status=2)
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    line = refusal("--megatron", tmp_path, status=2)
    assert "is Megatron 0.16.1; there are patches for 0.17 0.18 0.19" in line


def test_the_script_is_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    script = REPOSITORY / "scripts" / "apply_patches.sh"
    subprocess.run(["shellcheck", script], check=True, timeout=60)
