"""What a message costs over each transport, beside Megatron's own call on the same tensor.

Two processes pass a tensor back and forth. A round trip is two messages; half of it is the time
per message, and what both processes spend of the processor in it, halved, is the CPU time per
message. Megatron's side is its P2PCommunicator as its schedules call it, on gloo. Transports take
turns, round by round, since machines are noisy and only ratios within a round count.

    python scripts/bench_transports.py --json out/bench_transports.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext import cpu

cpu.enable()  # before Megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron_ext.pipeline.task import Direction, Header  # noqa: E402
from megatron_ext.pipeline.transport.base import Message, Transport, describe  # noqa: E402
from megatron_ext.pipeline.transport.choose import open_links  # noqa: E402

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
MEGATRON = "megatron"
SIZES = {"16 KiB": 16 << 10, "1 MiB": 1 << 20, "32 MiB": 32 << 20}
ROUND_S = 0.15
"""About how long a round of one transport takes on a quiet machine."""


def _megatron(rank: int) -> Callable[[torch.Tensor, int], None]:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    calls = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)

    def bounce(tensor: torch.Tensor, round_trips: int) -> None:
        for _ in range(round_trips):
            if rank == 0:
                calls.send_forward(tensor, False)
                calls.recv_backward(tensor.shape, False)
            else:
                calls.recv_forward(tensor.shape, False)
                calls.send_backward(tensor, False)

    return bounce


def _ours(rank: int, links: Transport) -> Callable[[torch.Tensor, int], None]:
    outgoing, incoming = (FORWARD, BACKWARD) if rank == 0 else (BACKWARD, FORWARD)

    def send(tensor: torch.Tensor, microbatch: int) -> None:
        dtype, shape = describe(tensor)
        links.send(Message(Header(0, outgoing, microbatch, 0, dtype, shape), tensor))

    def bounce(tensor: torch.Tensor, round_trips: int) -> None:
        links.expect(incoming, round_trips)
        for microbatch in range(round_trips):
            if rank == 0:
                send(tensor, microbatch)
            while links.take() is None:
                if not links.wait(60):
                    raise TimeoutError("no message for 60 s")
            links.consumed(incoming)
            if rank == 1:
                send(tensor, microbatch)
        links.flush(60)

    return bounce


def _rank_main(rank: int, args: argparse.Namespace, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    cpu.enable()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    peer = 1 - rank
    sources, destinations = {FORWARD: peer}, {BACKWARD: peer}
    if rank == 0:
        sources, destinations = {BACKWARD: peer}, {FORWARD: peer}
    bounces = {MEGATRON: _megatron(rank)}
    for name in args.transports:
        links = open_links(
            name,
            [0, 1],
            sources=sources,
            destinations=destinations,
            capacity=16,
            device=torch.device("cpu"),
            timeout_s=60,
        )
        bounces[name] = _ours(rank, links)

    def measure(bounce: Callable[..., None], tensor: torch.Tensor, count: int) -> tuple[float, ...]:
        bounce(tensor, 1)
        dist.barrier()
        started, spent = time.perf_counter(), time.process_time()
        bounce(tensor, count)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - spent
        total = torch.tensor([cpu_seconds])
        dist.all_reduce(total)
        return seconds / (2 * count), float(total) / (2 * count)

    for size, nbytes in args.sizes.items():
        tensor = torch.randn(nbytes // 256, 1, 64)
        for bounce in bounces.values():
            bounce(tensor, 2)
        single = torch.tensor([measure(bounces[MEGATRON], tensor, 5)[0]])
        dist.all_reduce(single, dist.ReduceOp.MAX)
        count = min(200, max(2, int(ROUND_S / (2 * float(single)))))
        for number in range(args.rounds):
            # Whoever comes first in a round is no better off.
            names = list(bounces)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                outcome = measure(bounces[name], tensor, count)
                if rank == 0:
                    results.put((size, number, name, *outcome))
    dist.barrier()
    os._exit(0)  # the other rank may be gone before destructors that need it run


def run(args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Run both processes; one record per size and transport, medians over the rounds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").Queue()
    processes = mp.spawn(_rank_main, (args, port, results), nprocs=2, join=False)
    names = [MEGATRON, *args.transports]
    total = len(args.sizes) * args.rounds * len(names)
    bar = progress.add_task("messages", total=total)
    seen: dict[tuple[str, int, str], tuple[float, float]] = {}
    while len(seen) < total:
        if results.empty():
            processes.join(timeout=0.2)  # raises if a process failed
            continue
        size, number, name, *outcome = results.get()
        seen[size, number, name] = tuple(outcome)
        progress.advance(bar)
    while not processes.join(timeout=10):
        pass
    records = []
    for size, nbytes in args.sizes.items():
        for name in names:
            mine = [seen[size, number, name] for number in range(args.rounds)]
            theirs = [seen[size, number, MEGATRON] for number in range(args.rounds)]
            record: dict[str, Any] = {"transport": name, "size": size, "bytes": nbytes}
            for index, quantity in enumerate(("time", "cpu")):
                values = [outcome[index] * 1e6 for outcome in mine]
                ratios = [m[index] / t[index] for m, t in zip(mine, theirs, strict=True)]
                record |= {
                    f"{quantity}_us": statistics.median(values),
                    f"{quantity}_us_min": min(values),
                    f"{quantity}_us_max": max(values),
                    f"{quantity}_ratio": statistics.median(ratios),
                    f"{quantity}_ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                }
            records.append(record)
    return records


def show(records: list[dict[str, Any]], console: Console) -> None:
    """Print one table."""
    table = Table(title="per message; ratio to Megatron's call: median [quartiles] over the rounds")
    for column in ("size", "transport", "time (us)", "ratio", "CPU (us)", "CPU ratio"):
        table.add_column(column, justify="left" if column in ("size", "transport") else "right")
    for record in records:
        ratios = [
            "{:.2f} [{:.2f}, {:.2f}]".format(
                record[f"{quantity}_ratio"], *record[f"{quantity}_ratio_quartiles"]
            )
            for quantity in ("time", "cpu")
        ]
        table.add_row(
            record["size"],
            record["transport"],
            f"{record['time_us']:.0f}",
            ratios[0],
            f"{record['cpu_us']:.0f}",
            ratios[1],
        )
    console.print(table)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    available = ["gloo", *(["nixl"] if importlib.util.find_spec("nixl") else [])]
    parser.add_argument("--transports", nargs="+", choices=["gloo", "nixl"], default=available)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error("needs at least 2 rounds")
    args.sizes = SIZES
    return args


def main() -> int:
    """Measure, print, write."""
    args = parse_arguments()
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        records = run(args, progress)
    show(records, console)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"settings": {"rounds": args.rounds}, "results": records}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
