"""Installing packages of Debian: what is there already, what is missing, what cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "install_debian_packages.sh"


def install(
    folder: Path, programs: dict[str, str], *packages: str
) -> subprocess.CompletedProcess[str]:
    """Run the script where only these programs and a few harmless ones exist."""
    for name in ("bash", "cat", "env", "mktemp", "rm", "tail", "touch"):
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    for name, text in programs.items():
        (folder / name).write_text(f"#!{folder}/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        [str(folder / "bash"), str(SCRIPT), *packages],
        env={"PATH": str(folder), "TMPDIR": str(folder), "HOME": os.environ.get("HOME", "/")},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )


# apt-get installs all but "unknown".
DPKG = "for package; do :; done; [[ -e have-$package ]] && echo -n installed || exit 1"
APT = (
    'echo "$@" >>asked; for package; do :; done\n'
    "[[ $package != unknown ]] || { echo no such package; exit 100; }\n"
    "[[ $package == update ]] || touch have-$package"
)
ROOT = {"id": "echo 0"}


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "have-munge").touch()
    result = install(tmp_path, {**ROOT, "dpkg-query": DPKG, "apt-get": APT}, "munge")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not (tmp_path / "asked").exists()


def test_what_is_missing_is_installed(tmp_path: Path) -> None:
    (tmp_path / "have-munge").touch()
    result = install(tmp_path, {**ROOT, "dpkg-query": DPKG, "apt-get": APT}, "munge", "slurm-wlm")
    assert result.returncode == 0
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith("install -y --no-install-recommends slurm-wlm")


@pytest.mark.parametrize(
    ("programs", "line"),
    [
        ({}, "this is no Debian"),
        ({"id": "echo 7", "dpkg-query": DPKG, "apt-get": APT}, "neither root nor sudo"),
        ({**ROOT, "dpkg-query": DPKG, "apt-get": APT}, "apt-get failed"),
    ],
)
def test_what_cannot_be_installed_is_said(
    tmp_path: Path, programs: dict[str, str], line: str
) -> None:
    result = install(tmp_path, programs, "unknown")
    assert result.returncode == 1
    assert line in result.stderr
    assert "not installed: unknown" in result.stderr
