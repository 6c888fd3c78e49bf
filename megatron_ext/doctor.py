"""`megatron-ext doctor`: what is installed, whether a run could start, and what to do if not.

Nothing of Megatron is imported: that takes seconds, and fails on the very installations that need
a doctor. Its version and functions are read from its source files. Whatever is missing, even
PyTorch or rich, ends in a line of the report and not in a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_ext import __version__
from megatron_ext.errors import UsageError
from megatron_ext.module_sources import defines, find_spec, first_on_path, has_source, source_of
from megatron_ext.python_version import MINIMUM_PYTHON, too_old

TORCH = ">=2.6"

ERROR = "error"
"""Nothing can start before this is settled."""
WARNING = "warning"
"""A run can start, but not with every flag, or not as fast as it could."""
NOTE = "note"
"""Nothing is wrong; something to know."""

EVERY_RUN, CPU, RRFP = "every run", "--cpu", "--pipeline-schedule rrfp"
HOOK_GROUPS = {
    "ARGUMENT_HOOKS": EVERY_RUN,
    "WHEEL_HOOKS": EVERY_RUN,
    "CPU_HOOKS": CPU,
    "RRFP_HOOKS": RRFP,
    "WEIGHT_GRADIENT_HOOKS": "--rrfp-hint bfw...",
    "TRANSFORMER_ENGINE_HOOKS": "--rrfp-hint bfw...",
    "METRICS_HOOKS": "--tensorboard-dir, --wandb-project",
    "JITTER_HOOKS": "--rrfp-jitter",
    "UPDATE_HOOKS": "--pipedream-2bw",
    "PIPEDREAM_2BW_HOOKS": "--pipedream-2bw",
    "COLLAPSE_HOOKS": "--collapse-reference",
}
"""What installs each table of `hooks.py`."""


PATCHED = "megatron.training.extensions"
"""A Megatron with our patches has this module."""


@dataclass(frozen=True)
class Problem:
    """Something to know or to do, in one line."""

    severity: str
    text: str


@dataclass(frozen=True)
class Package:
    """A package that megatron_ext or Megatron uses.

    Attributes:
        name: what pip calls it.
        module: what Python imports.
        purpose: what it is for.
        remedy: what to do where it is missing.
        versions: those known to work; "" where any does.
        missing: severity where it is missing; "" where that is as well.
    """

    name: str
    module: str
    purpose: str
    remedy: str
    versions: str = ""
    missing: str = ""


_REINSTALL = "install megatron_ext again, with what it needs"

PACKAGES = (
    Package("numpy", "numpy", "Megatron, and `megatron-ext corpus`", _REINSTALL, missing=ERROR),
    Package("rich", "rich", "tables and progress bars", _REINSTALL, missing=WARNING),
    Package(
        "emerging-optimizers",
        "emerging_optimizers",
        "Muon: --optimizer muon",
        "pip install 'emerging-optimizers>=0.3,<0.4'",
        versions=">=0.3,<0.4",
        missing=WARNING,
    ),
    Package(
        "wandb",
        "wandb",
        "Megatron's --wandb-project",
        "pip install wandb",
        missing=WARNING,
    ),
    Package(
        "wandb-workspaces",
        "wandb_workspaces",
        "dashboards: `megatron-ext wandb-workspace`",
        "pip install wandb-workspaces",
    ),
    Package(
        "transformer-engine",
        "transformer_engine",
        "GPU layers, FP8: Megatron's --transformer-impl transformer_engine",
        "pip install 'transformer-engine[pytorch]', or pass --transformer-impl local",
    ),
    Package(
        "nixl",
        "nixl",
        "messages between stages without host memory (--rrfp-transport nixl)",
        "pip install nixl",
    ),
)
APEX = Package(
    "apex (NVIDIA)",
    "apex",
    "fused CUDA kernels of Megatron's local layers and optimizers",
    "build it from NVIDIA's source; the apex on PyPI is another project",
)


OTHER_APEX = (
    "the installed apex is not NVIDIA's but another project of that name, and Megatron may take it "
    "for NVIDIA's: pip uninstall apex"
)


@dataclass(frozen=True)
class TorchFacts:
    """The PyTorch that would be used; all empty if there is none."""

    version: str | None = None
    cuda_build: str | None = None
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class MegatronFacts:
    """The Megatron that would be used; all None if there is none."""

    version: str | None = None
    location: str | None = None
    supported: bool | None = None
    patched: bool | None = None
    supported_range: str | None = None


@dataclass(frozen=True)
class PackageFacts:
    """A package and the version found, None if it is not there."""

    name: str
    version: str | None
    purpose: str


@dataclass(frozen=True)
class HookFacts:
    """A function of Megatron that would be replaced.

    Attributes:
        when: what installs the hook.
        target: dotted name of the function.
        why: what the hook is for.
        present: whether this Megatron has the function; None if there is no Megatron.
    """

    when: str
    target: str
    why: str
    present: bool | None


@dataclass
class Report:
    """All that the doctor found."""

    megatron_ext: str = __version__
    python: str = platform.python_version()
    executable: str = sys.executable
    torch: TorchFacts = TorchFacts()
    megatron: MegatronFacts = MegatronFacts()
    packages: list[PackageFacts] = field(default_factory=list)
    hooks: list[HookFacts] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether a run could start, if only on the CPU."""
        return all(problem.severity != ERROR for problem in self.problems)

    @property
    def verdict(self) -> str:
        """The report in one line."""
        if not self.ok:
            count = sum(problem.severity == ERROR for problem in self.problems)
            return f"No run can start: {count} error{'s' if count > 1 else ''} above."
        return f"A run can start{'' if self.torch.devices else ' on the CPU, with --cpu'}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `megatron-ext doctor` to its parser."""
    parser.add_argument(
        "--megatron",
        metavar="DIR",
        type=Path,
        help="look at the Megatron-LM checkout in DIR instead of the installed Megatron",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print the report.

    Returns:
        0 if a run could start, on the GPU or on the CPU; 1 if not.

    Raises:
        UsageError: --megatron names no Megatron.
    """
    report = examine(args.megatron)
    if args.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        _show(report)
    return 0 if report.ok else 1


def examine(checkout: Path | None = None) -> Report:
    """Look at Python, PyTorch, Megatron and the packages around them.

    Args:
        checkout: a Megatron-LM checkout to look at instead of the installed Megatron.

    Raises:
        UsageError: `checkout` has no Megatron in it.
    """
    if checkout is not None and not (checkout / "megatron" / "core").is_dir():
        raise UsageError(f"--megatron {checkout}: no megatron/core in it; name a checkout's root")
    report = Report()
    if sys.version_info[:2] < MINIMUM_PYTHON:
        _add(report, ERROR, too_old())
    _examine_torch(report)
    # As `python -m megatron_ext SCRIPT` does it: what lies beside the script comes first.
    with first_on_path(checkout):
        _examine_megatron(report)
        _examine_packages(report)
    return report


def _add(report: Report, severity: str, text: str) -> None:
    report.problems.append(Problem(severity, text))


# PyTorch and its devices.


def _examine_torch(report: Report) -> None:
    if find_spec("torch") is None:
        _add(report, ERROR, f"PyTorch is not installed: pip install 'torch{TORCH}'")
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch = importlib.import_module("torch")
    except Exception as error:
        _add(report, ERROR, f"PyTorch cannot be imported ({_line(error)}): install it again")
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            devices = _devices(torch)
        except Exception as error:
            devices = ()
            warnings.warn(_line(error), stacklevel=1)
    distributed = torch.distributed
    names = ("gloo", "nccl", "mpi", "ucc") if distributed.is_available() else ()
    report.torch = TorchFacts(
        version=str(torch.__version__),
        cuda_build=torch.version.cuda,
        backends=tuple(
            name for name in names if getattr(distributed, f"is_{name}_available", bool)()
        ),
        devices=devices,
    )
    if not _fits(str(torch.__version__), TORCH):
        _add(
            report, WARNING, f"PyTorch {torch.__version__} is outside {TORCH}: install a newer one"
        )
    if "gloo" not in report.torch.backends:
        _add(report, ERROR, "this PyTorch has no gloo: install one built with distributed support")
    if devices and "nccl" not in report.torch.backends:
        _add(report, WARNING, "this PyTorch has no NCCL: train with --distributed-backend gloo")
    for warning in caught:
        _add(report, WARNING, f"PyTorch about this machine's GPU: {_line(warning.message)}")
    if not devices:
        _add(report, NOTE, "no CUDA device is usable: add --cpu before the script")
        if report.torch.cuda_build is None and any(Path("/dev").glob("nvidia[0-9]*")):
            _add(
                report,
                WARNING,
                "this machine has an NVIDIA GPU but this PyTorch is built without CUDA: "
                "install a CUDA build of PyTorch",
            )


def _devices(torch: ModuleType) -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    every = (torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count()))
    return tuple(f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in every)


# Megatron and the hooks.


def _examine_megatron(report: Report) -> None:
    core = source_of("megatron.core")
    location = str(core.parent.parent.parent) if core else None
    report.megatron = MegatronFacts(location=location)
    if report.torch.version is None:
        _add(report, NOTE, "Megatron and the hooks are not examined: that needs PyTorch")
        return
    try:
        hooks: Any = importlib.import_module("megatron_ext.hooks")
        from megatron_ext.megatron_version import (
            SUPPORTED_MEGATRON,
            is_supported,
            megatron_version,
        )
    except Exception as error:
        _add(report, ERROR, f"megatron_ext cannot be used ({_line(error)}): {_REINSTALL}")
        return
    version = None
    try:
        version = megatron_version()
    except UsageError as error:
        _add(report, ERROR, str(error))
    report.megatron = MegatronFacts(
        version=None if version is None else str(version),
        location=location,
        supported=None if version is None else is_supported(version),
        patched=None if core is None else source_of(PATCHED) is not None,
        supported_range=SUPPORTED_MEGATRON,
    )
    if report.megatron.supported is False:
        _add(
            report,
            ERROR,
            f"Megatron {version} is outside the supported range {SUPPORTED_MEGATRON}: use "
            "one inside it, or pass --allow-untested-megatron",
        )
    _examine_hooks(report, hooks)
    if version is not None and core is not None:
        _examine_sources(report, core)


def _examine_hooks(report: Report, hooks: Any) -> None:
    for group, members in vars(hooks).items():
        if not group.endswith("_HOOKS"):
            continue
        when = HOOK_GROUPS.get(group, group)
        needed = when in (EVERY_RUN, RRFP) or (when == CPU and not report.torch.devices)
        for hook in members:
            present = None
            if report.megatron.version is not None:
                present = defines(source_of(hook.module), hook.name)
            report.hooks.append(HookFacts(when, hook.target, hook.why, present))
            if present is False:
                _add(
                    report,
                    ERROR if needed else WARNING,
                    f"Megatron {report.megatron.version} has no {hook.target}, which {when} needs "
                    f"to {hook.why}: use a Megatron {hook.versions} that is whole",
                )


def _examine_sources(report: Report, core: Path) -> None:
    """Look for what stops Megatron itself at its start."""
    training = source_of("megatron.training")
    if training is not None and training.parent.parent != core.parent.parent:
        _add(
            report,
            WARNING,
            f"megatron.core is from {core.parent.parent} but megatron.training from "
            f"{training.parent.parent}: use both from one Megatron",
        )
    datasets = core.parent / "datasets"
    if not (datasets / "Makefile").exists():
        always = [hook.target for hook in report.hooks if hook.when == EVERY_RUN]
        if report.torch.devices and "megatron.core.datasets.utils.compile_helpers" not in always:
            _add(
                report,
                WARNING,
                "this Megatron lacks the Makefile that it runs at its start unless --cpu is "
                "given: on the GPU run the pretrain_gpt.py of a Megatron-LM checkout",
            )
        return
    if any(datasets.glob("helpers_cpp*.so")):
        return
    tools = ("make", os.environ.get("CXX", "g++").split()[0], "python3-config")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if find_spec("pybind11") is None:
        missing.append("pybind11")
    if missing:
        _add(
            report,
            ERROR,
            f"Megatron compiles {datasets}/helpers.cpp at its start and lacks "
            f"{', '.join(missing)}: install what is missing",
        )


# Packages.


def _examine_packages(report: Report) -> None:
    for package in PACKAGES:
        installed = has_source(find_spec(package.module))
        version = _version(package.name) if installed else None
        report.packages.append(PackageFacts(package.name, version, package.purpose))
        missing = package.missing
        if package.name == "transformer-engine" and report.torch.devices:
            missing = WARNING
        if version is None and missing:
            _add(
                report,
                missing,
                f"{package.name} is not installed ({package.purpose}): {package.remedy}",
            )
        if version is not None and not _fits(version, package.versions):
            _add(
                report,
                WARNING,
                f"{package.name} {version} is outside {package.versions} ({package.purpose}): "
                f"{package.remedy}",
            )
    _examine_apex(report)


def _examine_apex(report: Report) -> None:
    """Tell NVIDIA's apex from the unrelated one by what is in it; both have the same name."""
    version = None
    if is_other_apex():
        _add(report, WARNING, OTHER_APEX)
    elif find_spec(APEX.module) is not None:
        version = _version(APEX.module)
        if find_spec("amp_C") is None:
            _add(
                report,
                WARNING,
                "NVIDIA apex is installed without its CUDA extensions, which Megatron would "
                "use: build it with them, or pip uninstall apex",
            )
    report.packages.append(PackageFacts(APEX.name, version, APEX.purpose))


def is_other_apex() -> bool:
    """Whether an apex is installed that is not NVIDIA's; nothing of it is imported."""
    spec = find_spec(APEX.module)
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return not any((folder / "optimizers" / "__init__.py").is_file() for folder in folders)


def _version(name: str) -> str:
    """The version of an installed package, where its metadata tell it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _fits(version: str, versions: str) -> bool:
    """Whether a version is in a range; yes where that cannot be told."""
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion
    except ImportError:  # reported where the hooks are read
        return True
    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidVersion:
        return True


def _line(error: object) -> str:
    """The first line of an error or warning."""
    return (str(error).strip() or repr(error)).splitlines()[0]


# The report as a person reads it.


@dataclass(frozen=True)
class _Table:
    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def _tables(report: Report) -> list[_Table]:
    torch, megatron = report.torch, report.megatron
    environment = [
        ("megatron_ext", f"{report.megatron_ext}, in {Path(__file__).resolve().parent}"),
        ("Python", f"{report.python}, {report.executable}"),
        ("PyTorch", torch.version or "not found"),
    ]
    if torch.version:
        environment += [
            ("  CUDA build", torch.cuda_build or "none"),
            ("  process groups", ", ".join(torch.backends) or "none"),
            ("  CUDA devices", "; ".join(torch.devices) or "none"),
        ]
    environment.append(("Megatron", _describe_megatron(megatron)))
    presence = {True: "yes", False: "MISSING", None: "-"}
    return [
        _Table("Environment", ("what", "found"), environment),
        _Table(
            "Packages",
            ("package", "version", "what for"),
            [(one.name, one.version or "not installed", one.purpose) for one in report.packages],
        ),
        _Table(
            "Hooks: functions of Megatron that are replaced, and by which flag",
            ("flag", "function", "to", "present"),
            [(hook.when, hook.target, hook.why, presence[hook.present]) for hook in report.hooks],
        ),
    ]


def _describe_megatron(megatron: MegatronFacts) -> str:
    if megatron.location is None:
        return "not found"
    if megatron.version is None:
        return f"in {megatron.location}"
    verdict = "supported" if megatron.supported else "NOT supported"
    return (
        f"{megatron.version}, in {megatron.location}; {verdict} "
        f"(the range is {megatron.supported_range})"
        + ("; it has our patches and our flags without -m megatron_ext" * bool(megatron.patched))
    )


def _show(report: Report) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _show_plainly(report)
        return
    # A pipe has no width; 80 columns would fold every long name.
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 240)
    for table in _tables(report):
        if table.rows:
            shown = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
            for heading in table.headings:
                shown.add_column(heading, overflow="fold")
            for row in table.rows:
                shown.add_row(*row)
            console.print(shown)
    colours = {ERROR: "bold red", WARNING: "yellow", NOTE: "cyan"}
    for problem in report.problems:
        label = Text(f"{problem.severity}: ", style=colours[problem.severity])
        console.print(label.append(problem.text, style="default"), soft_wrap=True)
    console.print(Text(report.verdict, style="green" if report.ok else "bold red"))


def _show_plainly(report: Report) -> None:
    for table in _tables(report):
        if table.rows:
            print(table.title)
            for row in table.rows:
                print("  " + " | ".join(row))
    for problem in report.problems:
        print(f"{problem.severity}: {problem.text}")
    print(report.verdict)
