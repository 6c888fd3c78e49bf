"""torchrun for one node of a SLURM job, which can ask its ranks for a checkpoint and the end.

Started by `job.sh` once per node. Ranks meet through the first node (torchrun's c10d rendezvous).
When the stop file appears, the first node's launcher sends SIGUSR1 to one of its ranks, once, as
soon as Megatron's handler (``--exit-signal-handler``) is in place there. All ranks ask each other
after every iteration whether it came. SLURM itself would send it to every process of the step, and
it ends those that do not expect it, such as wandb's monitor, the writers of asynchronous
checkpoints, and ranks that are about to end.

The exit status is that of the first rank that failed, which torchrun's own would not tell.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LOOK_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Start this node's ranks and wait for them.

    Returns:
        0 if all ended well, else the exit status of the first that failed; 1 if a signal ended it,
        128 and the signal's number if it ended this process.
    """
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="per node")
    parser.add_argument("--address", required=True, help="HOST:PORT of the first node")
    parser.add_argument("--job", required=True, help="the same on all nodes of one start of a job")
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="module and its arguments")
    args = parser.parse_args(argv)
    is_host = os.environ.get("SLURM_NODEID", "0") == "0"
    if is_host:
        threading.Thread(target=_pass_on, args=(args.stop_file,), daemon=True).start()
    try:
        torchrun.main(
            [
                *("--nnodes", str(args.nodes), "--nproc-per-node", str(args.ranks)),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", args.address),
                *("--rdzv-id", args.job, "--rdzv-conf", f"is_host={is_host},join_timeout=600"),
                *("--max-restarts", "0", "--module", *args.command),
            ]
        )
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"exit status {failure.exitcode}"
        if failure.exitcode < 0:
            how = signal.Signals(-failure.exitcode).name
        print(f"launch_ranks: rank {rank} ended first, with {how}", file=sys.stderr)
        return max(failure.exitcode, 1)
    except SignalException as error:
        return 128 + int(error.sigval)
    except Exception as error:  # the rendezvous' many ways to fail
        print(f"launch_ranks: error: {_reason(error, args.address)}", file=sys.stderr)
        return 1
    return 0


def _pass_on(stop_file: Path) -> None:
    """Signal a rank once the file is there and the rank can take it."""
    while True:
        time.sleep(LOOK_S)
        if not stop_file.exists():
            continue
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # one that has just ended
            for rank in psutil.Process().children():
                if _catches(rank.pid, signal.SIGUSR1):
                    rank.send_signal(signal.SIGUSR1)
                    return


def _catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def _reason(error: Exception, address: str) -> str:
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = (str(error).strip() or repr(error)).splitlines()[0]
    return f"the nodes did not meet at {address}: {type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main())
