"""Whether this Python is new enough, said before anything that an older one cannot even read."""

from __future__ import annotations

import platform
import sys

from megatron_ext.errors import UsageError

MINIMUM_PYTHON = (3, 12)


def check_python() -> None:
    """Refuse a Python that is too old.

    Raises:
        UsageError: It is.
    """
    if sys.version_info[:2] < MINIMUM_PYTHON:
        raise UsageError(too_old())


def too_old() -> str:
    """What to say of a Python that is too old."""
    wanted = ".".join(map(str, MINIMUM_PYTHON))
    return (
        f"Python {platform.python_version()} is too old: use {wanted} or newer, in an environment "
        "of its own"
    )
