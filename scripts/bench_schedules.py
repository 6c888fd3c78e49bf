r"""Megatron's 1F1B against the readiness-driven pipeline, on real processes with emulated compute.

Every stage is a process. A task's compute is a sleep whose length is drawn from a lognormal law,
the same for every policy; everything else is real: the autograd graph, Megatron's own 1F1B
function with its blocking communication, our executor with its threads, gloo underneath. One run
measures all policies, interleaved seed by seed, since machines are noisy and only ratios count.

    python scripts/bench_schedules.py --json out/bench_schedules.json

With --jitter-levels it also injects the delays of RRFP's evaluation and shows how much each policy
slows down. The paper's tasks take longer than this benchmark's default; tasks of its size:

    python scripts/bench_schedules.py --jitter-levels --forward-ms 15 --backward-ms 30 \
        --sigmas 0.3 --seeds 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext import cpu

cpu.enable()  # before Megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from emulated_stage import (  # noqa: E402
    HIDDEN_SIZE,
    SEQUENCE_LENGTH,
    Durations,
    EmulatedChunk,
    Meter,
    Work,
    forward_step,
)
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import (  # noqa: E402
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron_ext import hooks  # noqa: E402
from megatron_ext.arguments import Pipedream2bwConfig, RrfpConfig  # noqa: E402
from megatron_ext.hook import install  # noqa: E402
from megatron_ext.pipedream_2bw.clipping import clip_by  # noqa: E402
from megatron_ext.pipedream_2bw.delayed_updates import DelayedUpdates  # noqa: E402
from megatron_ext.pipeline import jitter  # noqa: E402
from megatron_ext.pipeline.batch_statistics import BatchStatistics  # noqa: E402
from megatron_ext.pipeline.hints import find_hint  # noqa: E402
from megatron_ext.pipeline.stage import StageExecutor  # noqa: E402
from megatron_ext.pipeline.trace_window import TraceWindow  # noqa: E402


@dataclass(frozen=True)
class Policy:
    """A schedule under test: Megatron's own where `hint` is None."""

    hint: str | None
    live_limit: str
    iterations: int = 1
    clip: str | None = None
    """Of two weight versions; None where every batch is flushed."""

    @property
    def name(self) -> str:
        """As shown in the table."""
        name = f"{self.hint} {self.live_limit}" if self.hint else "Megatron 1F1B"
        if self.clip is not None:
            name += f" + 2BW, clip {self.clip}"
        return name + (f", {self.iterations} iterations" if self.iterations > 1 else "")


# Slowdowns in percent, from Table 6 of the RRFP paper: a larger model, on GPUs.
PAPER_SLOWDOWNS = {
    "paper: 1F1B": {"J1": 2.82, "J2": 11.27, "J3": 18.06},
    "paper: RRFP (BF, 32)": {"J1": 1.81, "J2": 6.82, "J3": 11.36},
}

POLICIES = (
    Policy(None, "p"),
    Policy("1f1b", "p"),
    Policy("1f1b", "2p"),
    Policy("bf", "p"),
    Policy("bf", "2p"),
    Policy("bfw", "p"),
    Policy("bfw-depth", "p"),
    Policy("bfw-room", "p"),
    Policy("bfw-pieces", "p"),
    Policy("bfw", "1.5p"),
    Policy("bfw", "2p"),
    Policy("bfw-depth", "2p"),
    Policy("bfw-pieces", "2p"),
    Policy("fb", "2p"),
    Policy("b-priority", "2p"),
    Policy("f-priority", "2p"),
)


def policies_over(iterations: int) -> tuple[Policy, ...]:
    """Several iterations with optimizer steps: flushed each time, and with two weight versions."""
    return (
        Policy(None, "p", iterations),
        Policy("bfw", "2p", iterations),
        *(Policy(hint, limit, iterations, clip) for hint, limit, clip in TWO_VERSIONS),
    )


TWO_VERSIONS = (
    ("bfw", "p", "exact"),
    ("bfw", "2p", "exact"),
    ("bfw", "2p", "off"),
    ("bfw-pieces", "p", "exact"),
    ("bfw-pieces", "2p", "exact"),
)


@dataclass(frozen=True)
class Setting:
    """The conditions under which all policies run the same batch."""

    level: str
    """Name of the injected delays, a key of `jitter.LEVELS`."""
    sigma: float
    seed: int


def settings(args: argparse.Namespace) -> list[Setting]:
    """All conditions to measure, in order."""
    return [
        Setting(level, sigma, seed)
        for sigma in args.sigmas
        for seed in range(args.seeds)
        for level in args.jitter_levels
    ]


def settings_over_iterations(args: argparse.Namespace) -> list[Setting]:
    """The conditions for several iterations: fewer seeds, since each run is as much longer."""
    return [
        Setting("J0", sigma, seed) for sigma in args.sigmas for seed in range(-(-args.seeds // 2))
    ]


def make_delays(setting: Setting, stage: int) -> jitter.Jitter | None:
    """The injected delays of one stage, None where there are none."""
    config = jitter.LEVELS[setting.level]
    if not config.probability:
        return None
    return jitter.Jitter(
        config,
        stage=stage,
        iteration=lambda: setting.seed,
        stopwatch=jitter.HostStopwatch(),
    )


def _trace_window(args: argparse.Namespace, policy: Policy) -> TraceWindow | None:
    """Where a policy's traces go; the warm-up, iteration 0, is not traced."""
    if args.trace is None:
        return None
    return TraceWindow(args.trace / policy.name.replace(" ", "-"))


def _rank_main(rank: int, args: argparse.Namespace, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    cpu.enable()
    dist.init_process_group("gloo", rank=rank, world_size=args.stages)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=args.stages)
    config = TransformerConfig(
        num_layers=args.stages,
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=4,
        pipeline_model_parallel_size=args.stages,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
    )
    delays: jitter.Jitter | None = None
    delayed: DelayedUpdates | None = None
    iteration = 0
    setting_number = 0
    install(hooks.jitter_hooks(lambda: delays))
    install(hooks.UPDATE_HOOKS)
    schedules = {
        policy: StageExecutor(
            RrfpConfig(
                hint=policy.hint,
                live_limit=policy.live_limit,
                timeout_s=120,
                trace=_trace_window(args, policy),
            ),
            seed=1,
            iteration=lambda: iteration,
            jitter=lambda: delays,
            delayed=lambda: delayed,
        )
        if policy.hint
        else forward_backward_pipelining_without_interleaving
        for policy in (*args.policies, *args.policies_over_iterations)
    }

    def run(policy: Policy, work: Work) -> dict[str, Any]:
        nonlocal delayed, iteration
        # What one task does should be one sleep.
        layers = find_hint(policy.hint).weight_pieces if policy.hint else 1
        stage = EmulatedChunk(config, layers=layers)
        stage.begin(work.times(rank, 0), Meter(chunks=1))
        model, optimizer = _with_optimizer(stage) if policy.iterations > 1 else (stage, None)
        delayed = _two_versions(policy, model, optimizer) if policy.clip else None
        schedule = schedules[policy]
        costs: list[BatchStatistics] = []
        dist.barrier()
        started = time.perf_counter()
        for number in range(policy.iterations):
            # A trace of single iterations tells the settings apart by it.
            iteration = number if policy.iterations > 1 else setting_number
            if optimizer is not None:
                model.zero_grad_buffer()
                optimizer.zero_grad()
            schedule(
                forward_step_func=forward_step,
                data_iterator=None,
                model=model,
                num_microbatches=len(stage.times[0]) // policy.iterations,
                seq_length=SEQUENCE_LENGTH,
                micro_batch_size=1,
                forward_only=False,
            )
            if policy.hint:
                costs.append(schedule.statistics)
            if optimizer is not None:
                optimizer.step()
        dist.barrier()
        mine = {
            "makespan_s": time.perf_counter() - started,
            "peak_live": max(
                (one.peak_live for one in costs), default=min(args.stages - rank, args.microbatches)
            ),
            "dispatch_s": [seconds for one in costs for seconds in one.dispatch_s],
        }
        everyone: list[Any] = [None] * args.stages
        dist.all_gather_object(everyone, mine)
        dispatch = [seconds for one in everyone for seconds in one["dispatch_s"]]
        return {
            "makespan_s": max(one["makespan_s"] for one in everyone),
            "peak_live": max(one["peak_live"] for one in everyone),
            "dispatch_us": statistics.median(dispatch) * 1e6 if dispatch else None,
        }

    def measure_all(policies: Sequence[Policy], settings: list[Setting]) -> None:
        nonlocal delays, setting_number
        for policy in policies:  # connects, and warms up
            run(policy, Work.nothing(args.stages, 1, 2 * args.stages * policy.iterations))
        for setting_number, setting in enumerate(settings, 1):  # noqa: B007
            iterations = policies[0].iterations
            durations = Durations.draw(
                args.forward_ms,
                args.backward_ms,
                setting.sigma,
                setting.seed,
                (args.stages, args.microbatches * iterations),
            )
            # The level's delays are injected into Megatron's steps, by hooks.
            work = Work.draw(durations, "J0", setting.seed, chunks=1)
            for policy in policies:
                delays = make_delays(setting, rank)  # afresh: it learns how long tasks take
                outcome = run(policy, work)
                if rank == 0:
                    results.put((setting, policy, work.floor, outcome))

    measure_all(args.policies, settings(args))
    if args.policies_over_iterations:
        measure_all(args.policies_over_iterations, settings_over_iterations(args))
    dist.barrier()
    dist.destroy_process_group()


def _with_optimizer(stage: EmulatedChunk) -> tuple[Any, Any]:
    """The stage as Megatron wraps it, and Megatron's optimizer, which clips by all stages' norm."""
    stage.config.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(stage.config, DistributedDataParallelConfig(), stage)
    # Megatron sets this, once, where it trains; every run here has a model of its own.
    stage.config.no_sync_func = model.no_sync
    settings = OptimizerConfig(optimizer="sgd", lr=1e-3, clip_grad=1.0)
    return model, get_megatron_optimizer(settings, [model])


def _two_versions(policy: Policy, model: Any, optimizer: Any) -> DelayedUpdates:
    assert policy.clip is not None
    clip_by(policy.clip, optimizer)
    return DelayedUpdates(
        Pipedream2bwConfig(clip=policy.clip),
        [model],
        optimizer,
        end=policy.iterations,
        batch_size=lambda _: len(model.module.times[0]) // policy.iterations,
        two_gradient_buffers=policy.clip == "exact",
    )


def measure(args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Run all processes; one record per (level, sigma, policy), medians over the seeds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = mp.spawn(
        _rank_main, (args, port, results), nprocs=args.stages, join=False, start_method="spawn"
    )
    total = len(settings(args)) * len(args.policies)
    total += len(settings_over_iterations(args)) * len(args.policies_over_iterations)
    bar = progress.add_task("emulated batches", total=total)
    runs: list[tuple[Setting, Policy, float, dict[str, Any]]] = []
    while len(runs) < total:
        if results.empty():
            processes.join(timeout=0.2)  # raises if a process failed
            continue
        runs.append(results.get())
        progress.advance(bar)
    while not processes.join(timeout=10):
        pass
    makespans = {(setting, policy): o["makespan_s"] for setting, policy, _, o in runs}
    records = []
    for level, sigma in itertools.product(args.jitter_levels, args.sigmas):
        for policy in (*args.policies, *args.policies_over_iterations):
            several = policy.iterations > 1
            reference = (args.policies_over_iterations if several else args.policies)[0]
            mine = [
                (setting, floor, outcome)
                for setting, other, floor, outcome in runs
                if (setting.level, setting.sigma, other) == (level, sigma, policy)
            ]
            if not mine:
                continue
            outcomes = [outcome for *_, outcome in mine]
            speedups = [
                makespans[setting, reference] / outcome["makespan_s"]
                for setting, _, outcome in mine
            ]
            slowdowns = [
                outcome["makespan_s"] / makespans[replace(setting, level="J0"), policy] - 1
                for setting, _, outcome in mine
            ]
            dispatch = [o["dispatch_us"] for o in outcomes if o["dispatch_us"] is not None]
            record: dict[str, Any] = {
                "hint": policy.hint or "megatron-1f1b",
                "live_limit": policy.live_limit,
                "sigma": sigma,
                "jitter": level,
                "iterations": policy.iterations,
                "pipedream_2bw": policy.clip is not None,
                "clip": policy.clip,
                "peak_live": max(outcome["peak_live"] for outcome in outcomes),
                "dispatch_us": statistics.median(dispatch) if dispatch else None,
                "floor_s": statistics.median(floor for _, floor, _ in mine),
            }
            spreads = {
                "speedup": speedups,
                "slowdown": slowdowns,
                "floor_ratio": [floor / outcome["makespan_s"] for _, floor, outcome in mine],
                "makespan_s": [outcome["makespan_s"] for outcome in outcomes],
            }
            for name, values in spreads.items():
                record[name] = statistics.median(values)
                record[f"{name}_min"], record[f"{name}_max"] = min(values), max(values)
            records.append(record)
    return records


def show(records: list[dict[str, Any]], console: Console) -> None:
    """Print one table per sigma, and one of the slowdowns where delays were injected."""
    for sigma in sorted({record["sigma"] for record in records}):
        table = Table(title=f"lognormal sigma {sigma:g}; median (min to max) over the seeds")
        for column in (
            "policy",
            "makespan (ms)",
            "speedup",
            "of the floor",
            "peak live",
            "dispatch (us)",
        ):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for record in records:
            if (record["sigma"], record["jitter"]) != (sigma, "J0"):
                continue
            dispatch = record["dispatch_us"]
            table.add_row(
                _name(record),
                f"{record['makespan_s'] * 1e3:.0f}",
                "{speedup:.3f} ({speedup_min:.3f} to {speedup_max:.3f})".format(**record),
                f"{record['floor_ratio']:.1%}",
                str(record["peak_live"]),
                "-" if dispatch is None else f"{dispatch:.1f}",
            )
        console.print(table)
        _show_slowdowns(
            [r for r in records if r["sigma"] == sigma and r["iterations"] == 1], console
        )


def _name(record: dict[str, Any]) -> str:
    name = f"{record['hint']} {record['live_limit']}"
    if record["pipedream_2bw"]:
        name += f" + 2BW, clip {record['clip']}"
    if record["iterations"] > 1:
        name += f", {record['iterations']} iterations"
    return name


def _show_slowdowns(records: list[dict[str, Any]], console: Console) -> None:
    """Print how much the injected delays slow each policy down, beside the paper's figures."""
    levels = [level for level in jitter.LEVELS if any(r["jitter"] == level for r in records)]
    if levels == ["J0"]:
        return
    table = Table(
        title=f"slowdown under jitter, sigma {records[0]['sigma']:g}; median (min to max)"
    )
    table.add_column("policy")
    for level in levels[1:]:
        table.add_column(level, justify="right")
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        policy = _name(record)
        cells.setdefault(policy, {})[record["jitter"]] = (
            "{slowdown:.1%} ({slowdown_min:.1%} to {slowdown_max:.1%})".format(**record)
        )
    for policy, slowdowns in PAPER_SLOWDOWNS.items():
        cells[policy] = {level: f"{percent:.1f}%" for level, percent in slowdowns.items()}
    for policy, row in cells.items():
        table.add_row(policy, *(row[level] for level in levels[1:]))
    console.print(table)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--backward-ms", type=float, default=20.0)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.0, 0.3])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--iterations",
        type=int,
        default=10,
        help="iterations with optimizer steps, flushed and with two weight versions; 0 for none",
    )
    parser.add_argument(
        "--jitter-levels",
        nargs="*",
        metavar="LEVEL",
        choices=list(jitter.LEVELS),
        help="also run with the injected delays J1, J2 and J3 of the paper, or those named here",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="trace every policy but Megatron's into a folder of its own in DIR, one iteration per "
        "setting; megatron-ext simulate --from-trace reads it",
    )
    parser.add_argument("--json", type=Path, help="write the records to this file")
    args = parser.parse_args(argv)
    if min(args.stages - 1, args.microbatches, args.seeds) < 1:
        parser.error("needs at least 2 stages, 1 microbatch and 1 seed")
    if any(not math.isfinite(sigma) or sigma < 0 for sigma in args.sigmas):
        parser.error("--sigmas are finite and not negative")
    args.policies = POLICIES
    if args.jitter_levels is not None:
        args.iterations = 0
    args.policies_over_iterations = policies_over(args.iterations) if args.iterations > 1 else ()
    if args.jitter_levels is None:
        args.jitter_levels = ["J0"]
    else:  # J0 is what the others are compared with
        args.jitter_levels = sorted({"J0", *(args.jitter_levels or jitter.LEVELS)})
    return args


def main() -> int:
    """Measure, print, write."""
    args = parse_arguments()
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        records = measure(args, progress)
    show(records, console)
    if args.json:
        settings = {
            name: getattr(args, name)
            for name in (
                "stages",
                "microbatches",
                "forward_ms",
                "backward_ms",
                "seeds",
                "iterations",
            )
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"settings": settings, "results": records}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
