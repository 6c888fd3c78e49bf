r"""RRFP against PyTorch's own pipeline schedules and Megatron's, with emulated compute.

Real processes over gloo, one per rank; the schedules are the real ones of
`torch.distributed.pipelining` and of Megatron, and our executor; only a task's compute is a sleep.
All schedules sleep equally long on every rank, and all run in one go, round by round, since
machines are noisy and only ratios count.

    python scripts/bench_peers.py --json docs/data/bench_peers.json
    python scripts/bench_peers.py --table docs/data/bench_peers.json

The second line runs nothing: it prints the tables of docs/peers.md. A short run:

    python scripts/bench_peers.py --stages 4 --microbatches 32 --forward-ms 5 --backward-ms 10
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from megatron_ext import cpu

cpu.enable()  # before Megatron is imported
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from emulated_stage import Durations, Work  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from peer_ideals import ordered_s, simulated_s  # noqa: E402
from peer_schedules import OURS, PEERS, Policy, closed_form_s, make_runners, ours  # noqa: E402
from peer_tables import markdown, show  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

from megatron_ext.pipeline import jitter  # noqa: E402

print = functools.partial(print, flush=True)

Setting = tuple[float, str, int]
"""Sigma, level of injected delays, seed."""


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """All conditions to measure; a round of all policies each."""
    return [
        (sigma, level, seed)
        for seed in range(args.seeds)
        for sigma, level in itertools.product(args.sigmas, args.jitter_levels)
    ]


def _rank_main(rank: int, args: argparse.Namespace, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    cpu.enable()
    dist.init_process_group("gloo", rank=rank, world_size=args.stages)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=args.stages)
    runners = make_runners(args.policies, rank, args.stages, args.microbatches)

    def run(number: int, work: Work) -> dict[str, Any]:
        dist.barrier()
        started = time.perf_counter()
        meter = runners[number].run(work)
        dist.barrier()
        mine = {
            "makespan_s": time.perf_counter() - started,
            "peak_live": meter.peak,
            "missed_s": abs(meter.slept_s - work.of_rank(rank)),
        }
        everyone: list[Any] = [None] * args.stages
        dist.all_gather_object(everyone, mine)
        return {name: max(one[name] for one in everyone) for name in mine}

    for number, policy in enumerate(args.policies):  # connects, and warms up
        run(number, Work.nothing(args.stages, policy.chunks, args.microbatches))
        if rank == 0:
            results.put(None)
    for setting in settings_of(args):
        sigma, level, seed = setting
        durations = Durations.draw(
            args.forward_ms, args.backward_ms, sigma, seed, (args.stages, args.microbatches)
        )
        # Every other round the other way round: what drifts, drifts for all.
        order = range(len(runners))
        for number in reversed(order) if seed % 2 else order:
            policy = args.policies[number]
            work = Work.draw(durations, level, seed, policy.chunks)
            outcome = run(number, work)
            if rank == 0:
                order = runners[number].order
                if order is not None:
                    outcome["ideal_s"] = ordered_s(work, order, policy.v_shaped)
                else:
                    hint = policy.schedule if policy.family == OURS else "1f1b"
                    outcome["ideal_s"] = simulated_s(work, hint, policy.live_limit)
                results.put((setting, policy, work.floor, outcome))
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace, progress: Progress) -> list[Any]:
    """Run all processes; what every policy took under every condition."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").Queue()
    processes = mp.spawn(
        _rank_main, (args, port, results), nprocs=args.stages, join=False, start_method="spawn"
    )
    warm, total = len(args.policies), len(settings_of(args)) * len(args.policies)
    bar = progress.add_task("starting", total=warm + total)
    runs: list[Any] = []
    while len(runs) < warm + total:
        if results.empty():
            processes.join(timeout=0.2)  # raises if a process failed
            continue
        runs.append(results.get())
        where = "warming up" if runs[-1] is None else "sigma {:g}, {}, seed {}".format(*runs[-1][0])
        progress.update(bar, advance=1, description=where)
    while not processes.join(timeout=10):
        pass
    return runs[warm:]


def summarize(args: argparse.Namespace, runs: list[Any]) -> list[dict[str, Any]]:
    """One record per condition and policy: medians over the seeds, and who is ahead of whom."""
    makespans = {(setting, policy): outcome["makespan_s"] for setting, policy, _, outcome in runs}
    peaks = {
        policy: max(outcome["peak_live"] for _, other, _, outcome in runs if other == policy)
        for policy in args.policies
    }
    task_s = (args.forward_ms + args.backward_ms) / 1e3
    records = []
    for sigma, level in itertools.product(args.sigmas, args.jitter_levels):
        for policy in args.policies:
            mine = [
                (setting, floor, outcome)
                for setting, other, floor, outcome in runs
                if (*setting[:2], other) == (sigma, level, policy)
            ]
            equal = [] if policy.family == OURS else _at_equal_memory(policy, peaks)
            formula = closed_form_s(policy, args.stages, args.microbatches, task_s)
            record: dict[str, Any] = {
                "policy": policy.name,
                "family": policy.family,
                "chunks": policy.chunks,
                "v_shaped": policy.v_shaped,
                "sigma": sigma,
                "jitter": level,
                "peak_live": peaks[policy],
                "floor_s": statistics.median(floor for _, floor, _ in mine),
                "formula_s": formula if (sigma, level) == (0, "J0") else None,
                "missed_s": max(outcome["missed_s"] for *_, outcome in mine),
                "ideal_s": statistics.median(outcome["ideal_s"] for *_, outcome in mine),
                "ours_at_equal_memory": {},
            }
            spreads = {
                "makespan_s": [outcome["makespan_s"] for *_, outcome in mine],
                "floor_ratio": [floor / outcome["makespan_s"] for _, floor, outcome in mine],
                "speedup": [
                    makespans[setting, args.policies[0]] / outcome["makespan_s"]
                    for setting, _, outcome in mine
                ],
            }
            for name, values in spreads.items():
                record[name] = statistics.median(values)
                record[f"{name}_min"], record[f"{name}_max"] = min(values), max(values)
            for other in equal:
                ratios = [
                    outcome["makespan_s"] / makespans[setting, other]
                    for setting, _, outcome in mine
                ]
                record["ours_at_equal_memory"][other.name] = {
                    "median": statistics.median(ratios),
                    "min": min(ratios),
                    "max": max(ratios),
                }
            records.append(record)
    return records


def _at_equal_memory(peer: Policy, peaks: dict[Policy, float]) -> list[Policy]:
    """Ours that hold most without holding more than the peer: with one chunk, and with as many.

    Chosen by memory alone, not by what was fastest.
    """
    found = []
    for chunks in sorted({1, peer.chunks}):
        fitting = [
            policy
            for policy, peak in peaks.items()
            if policy.family == OURS and policy.chunks == chunks and peak <= peaks[peer]
        ]
        if fitting:
            found.append(max(fitting, key=lambda policy: peaks[policy]))
    return found


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=8, help="processes (default 8)")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--backward-ms", type=float, default=20.0)
    parser.add_argument(
        "--sigmas", type=float, nargs="+", default=[0.0], help="of the lognormal task times"
    )
    parser.add_argument(
        "--jitter-levels", nargs="+", choices=list(jitter.LEVELS), default=list(jitter.LEVELS)
    )
    parser.add_argument("--seeds", type=int, default=2, help="rounds per condition (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print the tables of such a file, run nothing"
    )
    args = parser.parse_args(argv)
    if args.stages < 2 or args.seeds < 1:
        parser.error("needs at least 2 --stages and 1 of --seeds")
    if args.microbatches < 2 * args.stages or args.microbatches % args.stages:
        parser.error(
            f"--microbatches {args.microbatches}: schedules with two chunks per rank need a "
            f"multiple of --stages {args.stages}, and at least twice as many"
        )
    if min(args.forward_ms, args.backward_ms, *args.sigmas) < 0:
        parser.error("--forward-ms, --backward-ms and --sigmas are not negative")
    args.policies = (*PEERS, *ours(args.stages))
    return args


def main() -> int:
    """Measure, print, write."""
    args = parse_arguments()
    if args.table:
        try:
            print(markdown(json.loads(args.table.read_text())))
        except (OSError, ValueError, KeyError) as error:
            print(f"bench_peers.py: error: --table {args.table}: {error}", file=sys.stderr)
            return 2
        return 0
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 132)
    with Progress(console=console) as progress:
        records = summarize(args, measure(args, progress))
    names = ("stages", "microbatches", "forward_ms", "backward_ms", "seeds")
    run = {
        "settings": {name: getattr(args, name) for name in names},
        "machine": {
            "date": time.strftime("%Y-%m-%d"),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "results": records,
    }
    show(records, console)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(run, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
