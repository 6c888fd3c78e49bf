"""The doctor on healthy, incomplete and broken installations: right, quick, never a traceback."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_ext import cli, doctor, hooks
from megatron_ext.doctor import ERROR, NOTE, WARNING, Report, examine
from megatron_ext.errors import UsageError
from megatron_ext.hook import Hook
from megatron_ext.megatron_version import SUPPORTED_MEGATRON, megatron_version
from megatron_ext.module_sources import find_spec

REPOSITORY = Path(__file__).parent.parent
GROUPS = {name: value for name, value in vars(hooks).items() if name.endswith("_HOOKS")}
EVERY_HOOK = tuple(hook for group in GROUPS.values() for hook in group)
IN_MEGATRON = tuple(hook for hook in EVERY_HOOK if hook.module.startswith("megatron."))
NEEDED = (*hooks.ARGUMENT_HOOKS, *hooks.WHEEL_HOOKS, *hooks.RRFP_HOOKS)

# Runs the command with some packages hidden, as if they were not installed.
RUN_WITHOUT = """
import importlib.machinery, sys

hidden = set(sys.argv.pop(1).split(","))

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            return None
        return super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context):
        for found in super().find_distributions(context):
            if found.name.replace("-", "_").lower() not in hidden:
                yield found

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
from megatron_ext import cli
status = cli.main(sys.argv[1:])
assert "megatron" not in sys.modules
sys.exit(status)
"""


def run_without(hidden: str, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT, hidden, "doctor", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def make_megatron(
    root: Path, version: str = "0.19.2", left_out: str = "", part: str = "megatron"
) -> Path:
    """A folder with the outlines of a Megatron: its version and the functions to hook."""
    major, minor, patch = version.split(".")
    sources = {
        "megatron/core/package_info.py": f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n"
        "PRE_RELEASE = ''\n"
    }
    for hook in EVERY_HOOK:
        text = f"if True:\n    def {hook.name}(): ...\n" if hook.name != left_out else "x = 1\n"
        path = f"{hook.module.replace('.', '/')}.py"
        sources[path] = sources.get(path, "") + text
    for name, text in sources.items():
        if not name.startswith(part):
            continue
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.parents:
            if folder.name == "megatron":
                break
            (folder / "__init__.py").touch()
    return root


def texts(report: Report, severity: str) -> list[str]:
    return [problem.text for problem in report.problems if problem.severity == severity]


def test_this_installation_is_whole() -> None:
    done = run_without("", "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["ok"]
    assert report["torch"]["version"] == torch.__version__
    assert report["megatron"]["version"] == importlib.metadata.version("megatron-core")
    assert report["megatron"]["supported"]
    assert {hook["target"] for hook in report["hooks"]} == {hook.target for hook in EVERY_HOOK}
    assert all(hook["present"] for hook in report["hooks"])
    assert not [one for one in report["problems"] if one["severity"] == ERROR]


def test_a_person_reads_everything_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for hook in EVERY_HOOK:
        assert hook.target in shown
    for package in doctor.PACKAGES:
        assert package.name in shown
    assert torch.__version__ in shown
    assert str(megatron_version()) in shown
    assert "A run can start" in shown.splitlines()[-1]


EVERYTHING = "torch,megatron,numpy,rich,packaging,emerging_optimizers,wandb,apex,nixl"


@pytest.mark.parametrize(
    ("hidden", "status", "expected"),
    [
        (EVERYTHING, 1, "error: PyTorch is not installed: pip install"),
        ("torch", 1, "error: PyTorch is not installed: pip install"),
        ("megatron,megatron_core", 1, "error: no Megatron found: install 'megatron-core"),
        ("packaging", 1, "error: megatron_ext cannot be used (No module named 'packaging')"),
        ("numpy", 1, "error: numpy is not installed"),
        ("rich", 0, "warning: rich is not installed"),
        ("emerging_optimizers,wandb", 0, "warning: emerging-optimizers is not installed (Muon"),
    ],
)
def test_nothing_missing_makes_it_fail(hidden: str, status: int, expected: str) -> None:
    done = run_without(hidden)
    assert done.returncode == status, done.stdout + done.stderr
    assert expected in done.stdout
    assert ("No run can start" in done.stdout) == bool(status)


def test_a_pytorch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: no such file')")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{RUN_WITHOUT}"
    done = subprocess.run(
        [sys.executable, "-c", script, "", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
    )
    assert done.returncode == 1, done.stderr
    assert "error: PyTorch cannot be imported (libcudart.so: no such file)" in done.stdout


def test_a_checkout_is_looked_at_instead(tmp_path: Path) -> None:
    report = examine(make_megatron(tmp_path, "0.20.0"))
    assert report.ok, report.problems
    assert (report.megatron.version, report.megatron.supported) == ("0.20.0", True)
    assert report.megatron.location == str(tmp_path)
    assert report.megatron.patched is False
    assert all(hook.present for hook in report.hooks)
    assert examine().megatron.version == str(megatron_version())


def test_a_patched_checkout_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_megatron(tmp_path)
    (tmp_path / "megatron" / "training" / "extensions.py").touch()
    assert examine(tmp_path).megatron.patched
    assert cli.main(["doctor", "--megatron", str(tmp_path)]) == 0
    assert "our flags without -m megatron_ext" in capsys.readouterr().out


def test_an_unsupported_megatron(tmp_path: Path) -> None:
    report = examine(make_megatron(tmp_path, "0.99.0"))
    assert not report.ok
    assert any("Megatron 0.99.0 is outside" in text for text in texts(report, ERROR))


@pytest.mark.parametrize("hook", IN_MEGATRON, ids=[hook.name for hook in IN_MEGATRON])
def test_a_megatron_without_a_hooked_function(tmp_path: Path, hook: Hook) -> None:
    report = examine(make_megatron(tmp_path, left_out=hook.name))
    # Several capabilities may replace one function.
    same = [other for other in EVERY_HOOK if other.target == hook.target]
    assert [one.target for one in report.hooks if not one.present] == [hook.target] * len(same)
    # A GPU can do without what is there for the CPU.
    needed = any(
        other in NEEDED or (other in hooks.CPU_HOOKS and not report.torch.devices) for other in same
    )
    assert report.ok == (not needed)
    said = texts(report, ERROR if needed else WARNING)
    assert any(f"has no {hook.target}" in text for text in said)


def test_every_table_of_hooks_has_a_flag() -> None:
    assert set(GROUPS) <= set(doctor.HOOK_GROUPS)


@pytest.mark.parametrize("source", ["def (", "\0"])
def test_a_broken_source_file(tmp_path: Path, source: str) -> None:
    make_megatron(tmp_path)
    (tmp_path / "megatron" / "training" / "arguments.py").write_text(source)
    report = examine(tmp_path)
    lost = {hook.target for hook in report.hooks if not hook.present}
    assert {target.rpartition(".")[0] for target in lost} == {"megatron.training.arguments"}
    assert not report.ok


def test_a_version_that_cannot_be_read(tmp_path: Path) -> None:
    (make_megatron(tmp_path) / "megatron" / "core" / "package_info.py").write_text("")
    report = examine(tmp_path)
    assert report.megatron.version is None
    assert any("does not tell Megatron's version" in text for text in texts(report, ERROR))


def test_half_a_checkout_is_mixed_with_the_installed_megatron(tmp_path: Path) -> None:
    report = examine(make_megatron(tmp_path, part="megatron/core"))
    assert any("use both from one Megatron" in text for text in texts(report, WARNING))


def test_a_checkout_whose_helper_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = make_megatron(tmp_path) / "megatron" / "core" / "datasets"
    (datasets / "Makefile").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    report = examine(tmp_path)
    assert any("make, g++, python3-config" in text for text in texts(report, ERROR))
    (datasets / "helpers_cpp.cpython-312-x86_64-linux-gnu.so").touch()
    assert examine(tmp_path).ok


@pytest.mark.parametrize("arguments", [["--megatron", "."], ["--megatron", "/no/such/place"]])
def test_a_folder_without_megatron_is_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", *arguments]) == 2
    assert f"--megatron {arguments[1]}: no megatron/core in it" in capsys.readouterr().err
    with pytest.raises(UsageError):
        examine(tmp_path)


def put_apex(folder: Path, *modules: str) -> None:
    for module in modules:
        path = folder / module / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('imported')")


def test_the_other_apex_is_told_from_nvidias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    put_apex(tmp_path, "apex", "apex/lib", "apex/models")
    report = examine()
    assert [text for text in texts(report, WARNING) if "apex" in text] == [
        "the installed apex is not NVIDIA's but another project of that name, and Megatron may "
        "take it for NVIDIA's: pip uninstall apex"
    ]
    assert report.packages[-1].version is None
    assert report.ok


def test_nvidias_apex_with_and_without_its_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    put_apex(tmp_path, "apex", "apex/optimizers")
    assert any("without its CUDA extensions" in text for text in texts(examine(), WARNING))
    put_apex(tmp_path, "amp_C")
    report = examine()
    assert report.packages[-1].version == "unknown version"
    assert not [text for text in texts(report, WARNING) if "apex" in text]


def test_a_placeholder_release_is_outside_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "999.9.9" if name == "emerging-optimizers" else version(name),
    )
    report = examine()
    assert any("optimizers 999.9.9 is outside" in text for text in texts(report, WARNING))


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "NVIDIA H200"
        total_memory = 140 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    report = examine()
    assert report.torch.devices == ("NVIDIA H200, 140 GiB",) * 2
    assert report.verdict == "A run can start."
    assert not texts(report, NOTE)
    if find_spec("transformer_engine") is None:
        assert any("--transformer-impl local" in text for text in texts(report, WARNING))


def test_a_gpu_that_pytorch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("driver too old\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    report = examine()
    assert "PyTorch about this machine's GPU: driver too old" in texts(report, WARNING)
    assert report.verdict == "A run can start on the CPU, with --cpu."


def test_ranges_are_those_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    for package in doctor.PACKAGES:
        if package.versions:
            assert SpecifierSet(package.versions) == wanted[package.name]
            assert package.versions in package.remedy
    assert wanted["megatron-core"] == SpecifierSet(SUPPORTED_MEGATRON)
    assert wanted["torch"] == SpecifierSet(doctor.TORCH)
    assert SpecifierSet(project["requires-python"]).contains("3.12")
