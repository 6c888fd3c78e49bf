"""The launcher of one node: the signal to one rank, and the status of the first that failed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.small_jobs import FILES

# Two ranks; they do not need PyTorch.
RANK = """
import os, signal, sys, time
rank, way = os.environ["RANK"], sys.argv[1]
if way == "wait":
    time.sleep(1.5)  # as long as Megatron needs to install its handler
    came = []
    signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    until = time.monotonic() + 6
    while time.monotonic() < until:
        time.sleep(0.05)
    open(f"signals-{rank}", "w").write(str(len(came)))
elif way == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    sys.exit(int(way))
"""


def start(folder: Path, way: str) -> subprocess.Popen[str]:
    (folder / "rank_of_test.py").write_text(RANK)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(FILES / "launch_ranks.py"), "--nodes", "1", "--ranks", "2"]
    words += ["--address", f"127.0.0.1:{port}", "--job", "1", "--stop-file", str(folder / "stop")]
    return subprocess.Popen(
        [*words, "rank_of_test", way],
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("way", "code", "line"),
    [("0", 0, ""), ("86", 86, "with exit status 86"), ("killed", 1, "with SIGKILL")],
)
def test_its_status_is_that_of_the_first_that_failed(
    tmp_path: Path, way: str, code: int, line: str
) -> None:
    process = start(tmp_path, way)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert line in output
    assert "Traceback" not in output


def test_one_rank_gets_one_signal_once_it_can_take_it(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()  # from the start: ranks without a handler would die of it
    process = start(tmp_path, "wait")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert sorted(int(file.read_text()) for file in tmp_path.glob("signals-*")) == [0, 1]
