"""What several tests need."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from megatron_ext.corpus import build_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-level corpus of real text: a package of the standard library."""
    prefix = tmp_path_factory.mktemp("corpus") / "stdlib"
    build_corpus([Path(sysconfig.get_path("stdlib")) / "asyncio"], prefix, suffixes=(".py",))
    return prefix
