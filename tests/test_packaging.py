"""The wheel and the sdist, and what importing the package says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from megatron_ext import __version__
from tests.training import REPOSITORY

# Every module of ours, with warnings as errors. What fails by a warning of another package, as
# Megatron's that there is no Transformer Engine, is imported again once that package is there.
IMPORT_ALL = """
import importlib, pkgutil, sys, warnings
import megatron_ext

def attempt(name):
    try:
        importlib.import_module(name)
    except Warning as warning:
        trace = warning.__traceback__
        while trace.tb_next:
            trace = trace.tb_next
        if trace.tb_frame.f_code.co_filename.startswith(megatron_ext.__path__[0]):
            raise
        return str(warning)

found = pkgutil.walk_packages(megatron_ext.__path__, "megatron_ext.")
names = [module.name for module in found if not module.name.endswith("__main__")]
failed = {name: said for name in names if (said := attempt(name))}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core, megatron.training.training
for name in failed:
    assert attempt(name) is None, name
print(len(names))
print(*failed)
"""


@dataclass(frozen=True)
class Built:
    """The two archives, with what is in them by path."""

    wheel: Path
    in_wheel: set[str]
    in_sdist: set[str]


def tracked() -> list[str]:
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("no git checkout to compare with")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy of what git has: the build leaves files where it runs."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as tar:
        members = [PurePosixPath(member.name) for member in tar.getmembers() if member.isfile()]
    assert {member.parts[0] for member in members} == {f"megatron_ext-{__version__}"}
    return Built(wheel, in_wheel, {str(PurePosixPath(*member.parts[1:])) for member in members})


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    package = {name for name in tracked() if name.startswith("megatron_ext/")}
    assert "megatron_ext/py.typed" in package
    metadata = f"megatron_ext-{__version__}.dist-info"
    others = {name for name in built.in_wheel if not name.startswith(f"{metadata}/")}
    assert others == package
    assert f"{metadata}/licenses/LICENSE" in built.in_wheel


def test_the_sdist_holds_everything(built: Built) -> None:
    made = {"PKG-INFO", "setup.cfg"}
    extra = {name for name in built.in_sdist if not name.startswith("megatron_ext.egg-info/")}
    assert extra - made == set(tracked())


def test_the_installed_wheel_works_elsewhere(built: Built, tmp_path: Path) -> None:
    target = tmp_path / "target"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", str(target), str(built.wheel)], check=True, timeout=100)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for words, expected in (
        (["--version"], f"megatron_ext {__version__}\n"),
        (["wandb-workspace", "--help"], "--dry-run"),
    ):
        done = subprocess.run(
            [str(target / "bin" / "megatron-ext"), *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert expected in done.stdout
    said = "import megatron_ext; print(megatron_ext.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", said], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(target))


def test_importing_every_module_says_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count, late = done.stdout.splitlines()[-2:]
    modules = list((REPOSITORY / "megatron_ext").rglob("*.py"))
    assert int(count) == len(modules) - 2  # the package itself and its __main__
    # Only what imports Megatron itself.
    assert all(
        name.startswith(("megatron_ext.pipe", "megatron_ext.hooks")) for name in late.split()
    )
