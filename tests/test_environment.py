"""How the scripts find Python, and what they say when they cannot go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "environment.sh"

# What the script calls.
TOOLS = ("basename", "bash", "cat", "cut", "dirname", "find", "flock", "ls", "mkdir", "mv", "rm")
TOOLS += ("sed", "sha256sum")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory for PATH with what the script calls, but no Python."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    return folder


def add_program(programs: Path, name: str, script: str) -> None:
    path = programs / name
    path.write_text(f"#!{programs}/bash\n{script}\n")
    path.chmod(0o755)


def prepare(programs: Path, venv: Path) -> subprocess.CompletedProcess[str]:
    """Source the script from another directory; packages cannot be fetched."""
    return subprocess.run(
        [str(programs / "bash"), "-euo", "pipefail", "-c", f"source '{SCRIPT}'; echo prepared"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=programs,
        env={
            "PATH": str(programs),
            "HOME": os.environ.get("HOME", "/"),
            "MEGATRON_EXT_VENV": str(venv),
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
        },
    )


def test_a_missing_python_is_one_line(programs: Path, tmp_path: Path) -> None:
    done = prepare(programs, tmp_path / "venv")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("environment: error: Python 3.12 or 3.13 is needed")


def test_stubs_and_other_pythons_are_no_python(programs: Path, tmp_path: Path) -> None:
    add_program(programs, "python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    add_program(programs, "python3", "exit 0")
    done = prepare(programs, tmp_path / "venv")
    assert done.returncode == 1
    assert "none works in PATH" in done.stderr.splitlines()[-1]


def test_a_python_without_venv_is_named(programs: Path, tmp_path: Path) -> None:
    add_program(programs, "python3.12", "echo 3.12")
    done = prepare(programs, tmp_path / "venv")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{programs}/python3.12 is Python 3.12 but lacks the venv module" in line


def test_a_directory_with_other_files_is_left_alone(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    done = prepare(programs, tmp_path / "home")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "holds other files" in line
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter.txt"]


def test_a_failed_installation_is_taken_up_again(programs: Path, tmp_path: Path) -> None:
    add_program(programs, "python3.12", "exit 127")
    (programs / "python3").symlink_to(sys.executable)
    venv = tmp_path / "venv"
    first = prepare(programs, venv)
    assert first.returncode == 1, first.stderr
    assert f"making {venv} with" in first.stderr
    assert "pip could not install" in first.stderr.splitlines()[-1]
    assert not (venv / ".megatron_ext-installed").exists()

    half = next(venv.glob("lib/python*/site-packages")) / "torch-0.dist-info"
    half.mkdir()
    (half / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0\n")
    second = prepare(programs, venv)
    assert "making" not in second.stderr
    assert "installing megatron_ext" in second.stderr
    assert not half.exists()

    (venv / "bin" / "python").unlink()
    third = prepare(programs, venv)
    assert f"making {venv} with" in third.stderr
