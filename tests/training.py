"""Real Megatron trainings on CPU, and exact records of what they computed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import random
import shlex
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.ranks import Rank, check_ranks, run_ranks

REPOSITORY = Path(__file__).parent.parent

BASE_FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 3"
    " --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1"
    " --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257"
    " --split 90,5,5 --eval-interval 1000 --eval-iters 0 --log-interval 1"
    " --make-vocab-size-divisible-by 1 --distributed-timeout-minutes 1"
)
RRFP = ["--pipeline-schedule", "rrfp"]


@dataclass(frozen=True)
class Disturbance:
    """What goes wrong, or only slow, on some rank."""

    delay_seed: int | None = None
    """Sleep up to 20 ms before some tasks, drawn from this seed and the rank."""
    rank: int = -1
    """The rank on which the rest happens."""
    iteration: int = 1
    at: str = "task"
    """In a training or an evaluation "task", or at the start of "finalize" (the reduction of
    gradients) or "checkpoint" (saving one)."""
    evaluation: bool = False
    """Whether the task is one of an evaluation."""
    microbatch: int = 2
    direction: str = "FORWARD"
    kill: bool = False
    """SIGKILL itself."""
    stop: bool = False
    """SIGSTOP itself."""
    disconnect: bool = False
    """Break every connection to other ranks."""
    stall_s: float = 0.0
    """Sleep."""
    terminate_others: bool = False
    """Once all wait for this rank, send SIGTERM to every other one."""
    garbage: bool = False
    """Send bytes that are no header instead of that task's message."""
    slow_ms: tuple[float, ...] = ()
    """Sleep this long before every task, by rank."""


def train(
    corpus: Path,
    processes: int,
    flags: Sequence[str] | str,
    *,
    disturbance: Disturbance | None = None,
    observe: Callable[[dict[str, Any]], None] | None = None,
    script: Path = REPOSITORY / "scripts" / "pretrain_gpt.py",
    start: Callable[[list[str]], None] | None = None,
    timeout_s: float = 140.0,
) -> tuple[list[Rank], list[dict[str, Any]]]:
    """Train through ``python -m megatron_ext --cpu``'s own entry point.

    Args:
        corpus: Prefix of the data.
        processes: Number of ranks.
        flags: Megatron's and ours, behind `BASE_FLAGS`.
        disturbance: What goes wrong.
        observe: Called in every rank before anything else, with its record, to add to it.
        script: The user's script.
        start: Runs the command line that it is given; by default by ``python -m megatron_ext``.
        timeout_s: Time limit for all.

    Returns:
        How each rank ended, and each rank's record (empty if it did not get to the end): the
        exact results of every training step and a hash of all weights.
    """
    if isinstance(flags, str):
        flags = shlex.split(flags)
    base = list(BASE_FLAGS)
    if "--step-batch-size-schedule" in flags:  # Megatron takes only one of them
        size = base.index("--global-batch-size")
        del base[size : size + 2]
    with tempfile.TemporaryDirectory() as folder:
        data = ["--data-path", str(corpus), "--data-cache-path", str(corpus.parent / "cache")]
        ranks = run_ranks(
            processes,
            _train_rank,
            [str(script), *base, *data, *flags],
            folder,
            disturbance or Disturbance(),
            observe,
            start,
            timeout_s=timeout_s,
        )
        records = []
        for rank in ranks:
            record = Path(folder) / f"{rank.number}.json"
            records.append(json.loads(record.read_text()) if record.exists() else {})
        return ranks, records


def train_well(*args: Any, **named: Any) -> list[dict[str, Any]]:
    """`train`, for runs that must end well; only the records."""
    ranks, records = train(*args, **named)
    check_ranks(ranks)
    assert all(records), "a rank ended well without a record"
    return records


def _train_rank(
    number: int,
    argv: list[str],
    folder: str,
    disturbance: Disturbance,
    observe: Callable[[dict[str, Any]], None] | None,
    start: Callable[[list[str]], None] | None,
) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import training

    os.environ["MEGATRON_EXT_TEST_FOLDER"] = folder
    (Path(folder) / f"{number}.pid").write_text(str(os.getpid()))
    from megatron_ext import __main__
    from megatron_ext.hook import installed

    record: dict[str, Any] = {"steps": [], "task_orders": []}
    # Megatron's own is kept by a helper process that first imports everything again.
    filesystem_async._results_queue = queue.Queue()
    if observe is not None:
        observe(record)
    _record_steps(training, record)
    _disturb(number, disturbance)
    try:
        if start is None:
            __main__.main(["--cpu", *argv])
        else:
            start(argv)
    except SystemExit as end:  # Megatron's way out at --exit-interval
        if end.code:
            raise
    record["weights"] = record.pop("hash")()
    record["hooks"] = [hook.target for hook in installed()]
    (Path(folder) / f"{number}.json").write_text(json.dumps(record))


def _record_steps(training: Any, record: dict[str, Any]) -> None:
    train_step = training.train_step

    def recording(*args: Any, **named: Any) -> Any:
        model = args[2]
        schedule = args[6] if len(args) > 6 else named["forward_backward_func"]
        outcome = train_step(*args, **named)
        record["hash"] = lambda: _hash(model)
        record["steps"].append(_exact(outcome))
        record["schedule"] = f"{schedule.__class__.__module__}.{schedule.__class__.__name__}"
        record["schedule_module"] = getattr(schedule, "__module__", "")
        if statistics := getattr(schedule, "statistics", None):
            record["task_orders"].append([str(task) for task in statistics.order])
            record["peak_live"] = max(record.get("peak_live", 0), statistics.peak_live)
        return outcome

    training.train_step = recording


def _processes() -> list[int]:
    """Process numbers of all ranks; each wrote its own at the start."""
    folder = Path(os.environ["MEGATRON_EXT_TEST_FOLDER"])
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def _exact(value: Any) -> Any:
    """`value` for JSON, with every digit of its tensors."""
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_exact(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _hash(model: list[Any]) -> str:
    digest = hashlib.sha256()
    for chunk in model:
        for name, tensor in sorted(chunk.state_dict().items()):
            digest.update(name.encode())
            if tensor is not None and hasattr(tensor, "numpy"):
                digest.update(tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()


def _disturb(number: int, disturbance: Disturbance) -> None:
    from megatron.training import training

    from megatron_ext.pipeline import stage

    if asdict(disturbance) == asdict(Disturbance()):
        return
    run_task = stage.StageExecutor.run_task
    delays = random.Random(f"{disturbance.delay_seed} {number}")

    def disturbed(self: Any, task: Any, batch: Any) -> None:
        if disturbance.delay_seed is not None and delays.random() < 0.5:
            time.sleep(delays.random() * 0.02)
        if disturbance.slow_ms:
            time.sleep(disturbance.slow_ms[number] / 1e3)
        if (
            _is_here("task", number, disturbance)
            and batch.forward_only == disturbance.evaluation
            and task.microbatch == disturbance.microbatch
            and task.kind.name == disturbance.direction
        ):
            _go_wrong(disturbance)
        run_task(self, task, batch)

    stage.StageExecutor.run_task = disturbed  # type: ignore[method-assign]
    for at, name in (("finalize", "finalize_model_grads"), ("checkpoint", "save_checkpoint")):
        function = functools.partial(_disturbed, number, disturbance, at, getattr(training, name))
        setattr(training, name, function)


def _disturbed(
    number: int,
    disturbance: Disturbance,
    at: str,
    function: Callable[..., Any],
    *args: Any,
    **named: Any,
) -> Any:
    if _is_here(at, number, disturbance):
        _go_wrong(disturbance)
    return function(*args, **named)


def _is_here(at: str, number: int, disturbance: Disturbance) -> bool:
    from megatron.training import get_args

    return (at, number, get_args().curr_iteration) == (
        disturbance.at,
        disturbance.rank,
        disturbance.iteration,
    )


def _go_wrong(disturbance: Disturbance) -> None:
    started = float(os.environ["MEGATRON_EXT_TEST_STARTED"])
    print(f"goes wrong after {time.monotonic() - started} s", flush=True)
    if disturbance.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if disturbance.stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    if disturbance.disconnect:
        _disconnect()
    if disturbance.terminate_others:
        time.sleep(1)
        for process in _processes():
            if process != os.getpid():
                os.kill(process, signal.SIGTERM)
    if disturbance.stall_s:
        time.sleep(disturbance.stall_s)
    if disturbance.garbage:
        from megatron_ext.pipeline import task as tasks

        tasks.Header.pack = lambda self: bytes([7]) * tasks.HEADER_BYTES  # type: ignore


def _disconnect() -> None:
    """Shut every connection of this process down, as when its network card fails."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
            with connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # fails for those that only listen
                    connection.shutdown(socket.SHUT_RDWR)
