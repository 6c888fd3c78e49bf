"""What machine and software `gpu_check.py` ran on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "megatron-core", "transformer-engine", "nixl", "emerging-optimizers")


def describe(repository: Path) -> dict[str, Any]:
    """Versions and hardware; ``gpu`` is None without one, and ``no_gpu`` says why.

    CUDA is not touched in this process beyond asking whether it is there.
    """
    import torch

    gpu, why = None, "this PyTorch is built without CUDA"
    if torch.version.cuda:
        why = "PyTorch sees no CUDA device on this machine"
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            gpu = {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
                "driver": _driver(),
            }
    return {
        "gpu": gpu,
        "no_gpu": None if gpu else why,
        "cuda": torch.version.cuda,
        "cpu_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "megatron_ext": _commit(repository),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def has(module: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _commit(repository: Path) -> str:
    from megatron_ext import __version__

    commit = _output("git", "-C", str(repository), "rev-parse", "--short", "HEAD")
    return f"{__version__} ({commit})" if commit else __version__


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else None
