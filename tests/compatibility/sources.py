"""The sources of released Megatrons: from PyPI once, then from a folder of the user's cache."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

VERSIONS = ("0.17.1", "0.18.2", "0.19.2")
"""The last release of every supported series."""


class UnavailableError(Exception):
    """PyPI could not be asked, and the cache holds no copy."""


def cache() -> Path:
    """Where the copies are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "megatron_ext" / "megatron-core"


@functools.cache
def sources_of(version: str) -> Path:
    """A folder that holds the folder ``megatron`` of a release; not to be changed.

    Raises:
        UnavailableError: It cannot be had; the text says why.
    """
    folder = cache() / version
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", scratch]
        try:
            done = subprocess.run(
                [*pip, f"megatron-core=={version}"], capture_output=True, text=True, timeout=120
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"megatron-core {version}: PyPI does not answer") from None
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip() or "no wheel for this Python").splitlines()[-1]
            raise UnavailableError(f"megatron-core {version} cannot be downloaded: {reason}")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(unpacked)
        if not folder.is_dir():  # another run may have been quicker
            unpacked.rename(folder)
    return folder


def sources(version: str) -> Path:
    """`sources_of`, for tests: skips where they cannot be had."""
    try:
        return sources_of(version)
    except UnavailableError as error:
        pytest.skip(str(error))


if __name__ == "__main__":  # used by scripts/test_compatibility.sh
    try:
        print(sources_of(sys.argv[1]))
    except UnavailableError as error:
        sys.exit(f"error: {error}")
