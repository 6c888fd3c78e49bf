"""Starts gloo ranks as real processes, with a time limit, and shows what each of them printed."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ranks are forked from a server that has imported PyTorch and Megatron once: a rank starts in
# milliseconds instead of seconds.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


@dataclass(frozen=True)
class Rank:
    """How one rank ended."""

    number: int
    exit_code: int | None
    """None if it had to be killed at the time limit."""
    seconds: float
    """From the start of all ranks to the end of this one."""
    output: str

    @property
    def error_line(self) -> str:
        """The line in which it said why it ended."""
        lines = [line for line in self.output.splitlines() if "megatron_ext: error:" in line]
        return lines[0] if len(lines) == 1 else f"{len(lines)} error lines in:\n{self.output}"


def run_ranks(
    count: int,
    target: Callable[..., None],
    *args: Any,
    timeout_s: float = 90.0,
    environment: dict[str, str] | None = None,
) -> list[Rank]:
    """Run ``target(rank, *args)`` in `count` processes with torchrun's variables set.

    Ranks that outlive `timeout_s` are killed and have no exit code; before that they print where
    all their threads are. A rank that stopped itself is continued once all others have ended.
    Nothing is checked here.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{number}" for number in range(count)]
        processes = []
        started = time.monotonic()
        for number, output in enumerate(outputs):
            variables = {
                "RANK": number,
                "LOCAL_RANK": number,
                "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "MEGATRON_EXT_TEST_STARTED": started,
                **(environment or {}),
            }
            # Not a daemon: Megatron starts a helper process to write checkpoints.
            process = _CONTEXT.Process(
                target=_rank_main,
                args=(variables, started + timeout_s, str(output), target, number, args),
            )
            process.start()
            processes.append(process)
        ended: dict[int, float] = {}
        try:
            while len(ended) < count and time.monotonic() - started < timeout_s:
                for number, process in enumerate(processes):
                    if number not in ended and not process.is_alive():
                        ended[number] = time.monotonic() - started
                left = [process for number, process in enumerate(processes) if number not in ended]
                if all(_is_stopped(process) for process in left):
                    for process in left:
                        os.kill(process.pid or 0, signal.SIGCONT)
                time.sleep(0.01)
        finally:
            for process in processes:
                _kill_with_helpers(process)
        return [
            Rank(
                number,
                process.exitcode if number in ended else None,
                ended.get(number, timeout_s),
                outputs[number].read_text(errors="replace") if outputs[number].exists() else "",
            )
            for number, process in enumerate(processes)
        ]


def check_ranks(ranks: list[Rank]) -> None:
    """Fail with every rank's output unless all ended well."""
    if all(rank.exit_code == 0 for rank in ranks):
        return
    report = "\n".join(
        f"---- rank {rank.number}: exit code {rank.exit_code} after {rank.seconds:.1f} s\n"
        + "\n".join(rank.output.splitlines()[-60:])
        for rank in ranks
    )
    raise AssertionError(f"not every rank ended well\n{report}")


def _rank_main(
    variables: dict[str, Any],
    deadline: float,
    output: str,
    target: Callable[..., None],
    number: int,
    args: Any,
) -> None:
    os.setpgid(0, 0)  # its helpers can be killed with it
    os.environ.update({name: str(value) for name, value in variables.items()})
    with _captured(output):
        # One that hangs says where before it is killed.
        faulthandler.dump_traceback_later(max(deadline - time.monotonic() - 1.0, 0.1))
        try:
            target(number, *args)
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    # A normal exit would wait for threads and run destructors that need the other ranks.
    os._exit(0)


def _is_stopped(process: Any) -> bool:
    try:
        status = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:  # it has just ended
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _kill_with_helpers(process: Any) -> None:
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


@contextlib.contextmanager
def _captured(path: str) -> Iterator[None]:
    with open(path, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    yield
    sys.stdout.flush()
    sys.stderr.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
