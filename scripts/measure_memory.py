r"""What a pipeline stage holds in memory, synchronously and with two weight versions.

Trains a small GPT through Megatron's own loop, one process per stage, and counts the bytes of all
weights, gradient buffers, optimizer states and saved activations, each piece of memory once.

    python scripts/measure_memory.py --json docs/data/memory.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ext.corpus import build_corpus

REPOSITORY = Path(__file__).parent.parent
RRFP = "--pipeline-schedule rrfp --rrfp-hint"
RUNS = {
    "Megatron 1F1B": "",
    "RRFP bfw p": f"{RRFP} bfw",
    "RRFP bf 2p": f"{RRFP} bf",
    "2BW bfw p, clip exact": f"{RRFP} bfw --pipedream-2bw",
    "2BW bfw p, clip off, no feedback": (
        f"{RRFP} bfw --pipedream-2bw --pipedream-2bw-clip off --pipedream-2bw-error-feedback 0"
    ),
    "2BW bfw 2p, clip exact": f"{RRFP} bfw --rrfp-live-limit 2p --pipedream-2bw",
}


def _bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _rank_main(rank: int, argv: list[str], port: int, queue: Any) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank)
    )
    os.environ.update(WORLD_SIZE=argv[argv.index("--pipeline-model-parallel-size") + 1])
    from megatron_ext import __main__, cpu
    from megatron_ext.pipeline import megatron_loop

    cpu.enable()
    import torch
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    torch.set_num_threads(1)
    live, peak = 0, 0
    per_microbatch: list[int] = []
    forward_step, backward_step, train_step = (
        schedules.forward_step,
        schedules.backward_step,
        training.train_step,
    )
    model: list[Any] = []

    def forward(*args: Any, **named: Any) -> Any:
        nonlocal live, peak
        weights = {p.untyped_storage().data_ptr() for m in model for p in m.parameters()}
        saved: list[Any] = []

        def keep(tensor: Any) -> Any:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = forward_step(*args, **named)
        per_microbatch.append(_bytes(saved, weights))
        live += 1
        peak = max(peak, live)
        return result

    def backward(*args: Any, **named: Any) -> Any:
        nonlocal live
        live -= 1
        return backward_step(*args, **named)

    def step(*args: Any, **named: Any) -> Any:
        model[:] = args[2]
        outcome = train_step(*args, **named)
        if (executor := megatron_loop.current()) is not None and executor.statistics is not None:
            peaks.append(executor.statistics.peak_live)
        figures.update(_figures(args[2], args[3]))
        return outcome

    peaks: list[int] = []
    figures: dict[str, int] = {}
    schedules.forward_step, schedules.backward_step = forward, backward
    training.train_step = step
    with contextlib.redirect_stdout(io.StringIO()):
        __main__.main(["--cpu", *argv])
    figures["peak live"] = max(peaks, default=peak)
    figures["activations"] = max(per_microbatch, default=0) * figures["peak live"]
    queue.put((rank, figures))


def _figures(model: list[Any], optimizer: Any) -> dict[str, int]:
    """Bytes by what they hold."""
    from megatron_ext.pipedream_2bw import megatron_loop
    from megatron_ext.pipedream_2bw.error_feedback import KEY
    from megatron_ext.pipedream_2bw.leaf_optimizers import leaf_optimizers

    seen: set[int] = set()
    figures = {"weights": _bytes((p for m in model for p in m.parameters()), seen)}
    figures["gradients"] = _bytes((b.grad_data for m in model for b in m.buffers), seen)
    delayed = megatron_loop.current()
    versions = gradients = 0
    if delayed is not None:
        second = list(delayed.weights._memory.pairs())
        versions = _bytes((tensor for pair in second for tensor in pair), seen)
        copies = delayed._gradients._slots._pointers
        gradients = _bytes(
            (t for *_, pair in copies for t in pair if hasattr(t, "untyped_storage")), seen
        )
    states = [s for one in leaf_optimizers(optimizer) for s in one.optimizer.state.values()]
    history = _bytes((s[KEY] for s in states if KEY in s), seen)
    state = _bytes((t for s in states for t in s.values() if hasattr(t, "untyped_storage")), seen)
    return {
        **figures,
        "second weight version": versions,
        "second gradient buffer": gradients,
        "optimizer": state,
        "last update": history,
    }


def measure(args: argparse.Namespace, flags: str, data: Path) -> list[dict[str, int]]:
    """Train with these flags; the figures of every stage."""
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [str(REPOSITORY / "scripts" / "pretrain_gpt.py")]
    argv += (
        f"--num-layers {args.stages} --hidden-size {args.hidden_size} --num-attention-heads 4"
        f" --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1"
        f" --global-batch-size {4 * args.stages} --train-iters 4 --lr 1e-3 --optimizer adam"
        " --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1"
        f" --data-path {data} --data-cache-path {data.parent / 'cache'} --split 95,5,0"
        " --eval-interval 1000 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
        f" --untie-embeddings-and-output-weights --pipeline-model-parallel-size {args.stages}"
        f" {flags}"
    ).split()
    queue = mp.get_context("spawn").Queue()
    context = mp.spawn(_rank_main, (argv, port, queue), args.stages, join=False)
    found = dict(queue.get(timeout=600) for _ in range(args.stages))
    while not context.join(timeout=10):
        pass
    return [found[stage] for stage in range(args.stages)]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    console = Console(stderr=True)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "standard-library"
        build_corpus(
            [Path(sysconfig.get_path("stdlib"))],
            data,
            suffixes=[".py"],
            exclude=("site-packages", "test", "tests", "__pycache__"),
        )
        for name, flags in RUNS.items():
            console.print(f"{name} ...")
            found[name] = measure(args, flags, data)
    for stage in (0, args.stages - 1):
        table = Table(title=f"KiB on stage {stage} of {args.stages}")
        for column in ("run", *found["Megatron 1F1B"][0]):
            table.add_column(column, justify="left" if column == "run" else "right")
        for name, stages in found.items():
            cells = (
                str(value) if key == "peak live" else f"{value / 1024:.0f}"
                for key, value in stages[stage].items()
            )
            table.add_row(name, *cells)
        console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"stages": args.stages, "runs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
