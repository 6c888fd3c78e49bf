"""One rank of a training of `gpu_check.py`: runs `pretrain_gpt.py` and records what it computed.

All ranks of a run share the one GPU, so each is told that its local rank is 0. NCCL refuses two
ranks on one GPU; collectives and Megatron's own messages go over gloo then. Gloo sends no GPU
memory, so Megatron's messages are staged through the host here. Those of RRFP need no such help.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent / "pretrain_gpt.py"

# What reproducible kernels ask for, and tensor parallelism before Blackwell.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


def rank_main(rank: int, ranks: int, port: int, argv: list[str], folder: str, cpu: bool) -> None:
    """Train; leaves ``rank-N.log`` and, if it ends well, ``rank-N.json`` in `folder`."""
    os.environ.update(ENVIRONMENT)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="0")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    log = os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    from megatron_ext import __main__
    from megatron_ext import cpu as on_cpu

    if cpu:
        on_cpu.enable()
    from megatron.training import training

    record: dict[str, Any] = {"steps": []}
    _stage_messages(everything=cpu)
    _record_steps(training, record)
    try:
        __main__.main([*(["--cpu"] if cpu else []), str(SCRIPT), *argv])
    except SystemExit as end:
        if end.code:
            print(end.code, file=sys.stderr, flush=True)
            os._exit(1)
    record["weights"] = record.pop("hash")()
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(record))
    sys.stdout.flush()
    # A normal exit would wait for threads and run destructors that need the other ranks.
    os._exit(0)


def _record_steps(training: Any, record: dict[str, Any]) -> None:
    import torch

    train_step = training.train_step

    def recording(*args: Any, **named: Any) -> Any:
        schedule = args[6] if len(args) > 6 else named["forward_backward_func"]
        torch.cuda.synchronize()
        started = time.perf_counter()
        outcome = train_step(*args, **named)
        torch.cuda.synchronize()
        step = {"seconds": time.perf_counter() - started, "result": _exact(outcome)}
        step["loss"] = _loss(outcome[0])
        step["schedule"] = getattr(schedule, "__name__", type(schedule).__name__)
        batch = getattr(schedule, "statistics", None)
        if batch is not None:
            step["peak_live"] = batch.peak_live
            step["kinds"] = sorted({task.kind.name for task in batch.order})
            step["dispatch_us"] = _median_us(batch.dispatch_s)
            step["agreement_us"] = _median_us(batch.agreement_s)
        record["steps"].append(step)
        record["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        record["hash"] = lambda: _hash(args[2])
        return outcome

    training.train_step = recording


def _loss(reported: dict[str, Any]) -> float | None:
    """The loss of a step, on the last stage: a mean, or a sum with the number of tokens."""
    if not reported:
        return None
    value = next(iter(reported.values()))
    values = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, list | tuple):
        return float(values[0]) / (float(values[1]) if len(values) > 1 else 1.0)
    return float(values)


def _median_us(seconds: list[float]) -> float | None:
    return statistics.median(seconds) * 1e6 if seconds else None


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
                digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


class _Staged:
    """A receive into host memory that ends in a tensor on the GPU."""

    def __init__(self, work: Any, host: Any, tensor: Any) -> None:
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self, *args: Any) -> Any:
        done = self._work.wait(*args)
        self._tensor.data.copy_(self._host)  # it may be an input that needs its gradient
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _stage_messages(everything: bool) -> None:
    """Let Megatron's own schedules send GPU tensors over gloo, through the host.

    Args:
        everything: Stage tensors of the CPU as well, so that it can be tried there.
    """
    import torch
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    isend, irecv = c10d.isend, c10d.irecv

    def stages(tensor: Any, group: Any) -> bool:
        return (everything or tensor.is_cuda) and dist.get_backend(group) == "gloo"

    def staged_isend(tensor: Any, *args: Any, **named: Any) -> Any:
        group = named.get("group", args[1] if len(args) > 1 else None)
        if stages(tensor, group):
            tensor = tensor.detach().to("cpu", copy=True)
        return isend(tensor, *args, **named)

    def staged_irecv(tensor: Any, *args: Any, **named: Any) -> Any:
        group = named.get("group", args[1] if len(args) > 1 else None)
        if not stages(tensor, group):
            return irecv(tensor, *args, **named)
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Staged(irecv(host, *args, **named), host, tensor)

    for module in (c10d, dist):
        module.isend, module.irecv = staged_isend, staged_irecv
