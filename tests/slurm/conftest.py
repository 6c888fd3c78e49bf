"""One cluster for all tests of jobs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes; a short path, since that of a socket is limited."""
    if missing := missing_programs():
        pytest.skip(
            f"no {', '.join(missing)} on this machine: "
            "scripts/install_debian_packages.sh slurm-wlm munge installs them where it can"
        )
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        running_cluster(Path(folder)) as it,
    ):
        yield it
