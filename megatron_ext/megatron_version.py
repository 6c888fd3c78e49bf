"""Which Megatron would be used, and whether it is one that we know."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_ext.errors import UsageError

SUPPORTED_MEGATRON = ">=0.17,<0.21"


def megatron_version() -> Version:
    """The version of the Megatron that would be used, a checkout's or an installed one.

    Raises:
        UsageError: There is none.
    """
    core = _core_folder()
    if core is not None:  # read on its own: importing megatron.core takes seconds
        return _read_version(core / "package_info.py")
    raise UsageError(
        f"no Megatron found: install 'megatron-core{SUPPORTED_MEGATRON}', or give a script that "
        "lies in a Megatron-LM checkout"
    )


def _read_version(package_info: Path) -> Version:
    constants = {
        target.id: node.value.value
        for node in ast.parse(package_info.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    try:
        numbers = ".".join(str(constants[name]) for name in ("MAJOR", "MINOR", "PATCH"))
        return Version(numbers + str(constants["PRE_RELEASE"]))
    except (KeyError, InvalidVersion):
        raise UsageError(f"{package_info} does not tell Megatron's version") from None


def is_supported(version: Version) -> bool:
    """Whether this megatron_ext is tested with that Megatron."""
    return SpecifierSet(SUPPORTED_MEGATRON).contains(version, prereleases=True)


def check_version(allow_untested: bool = False) -> Version:
    """The version of Megatron, if it may be used.

    Raises:
        UsageError: There is no Megatron, or one outside the supported range and
            `allow_untested` is not set.
    """
    version = megatron_version()
    if not is_supported(version) and not allow_untested:
        raise UsageError(
            f"found Megatron {version}, supported are {SUPPORTED_MEGATRON}: install one of those "
            "or pass --allow-untested-megatron"
        )
    return version


def comes_without_makefile() -> bool:
    """Whether this Megatron is a wheel, which brings its dataset helper compiled."""
    core = _core_folder()
    return core is not None and not (core / "datasets" / "Makefile").exists()


def _core_folder() -> Path | None:
    """Where megatron.core lies; None if there is none."""
    spec = importlib.util.find_spec("megatron")
    folders = [Path(f) / "core" for f in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if (folder / "package_info.py").is_file()), None)
