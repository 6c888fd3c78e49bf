r"""Simulated against measured makespans, for every policy of scripts/bench_schedules.py.

    python scripts/bench_schedules.py --sigmas 0.3 --iterations 0 --trace out/bench
    python scripts/compare_simulation.py out/bench --sigma 0.3

Predicts each run twice: from the task times in its own trace; and from the times that were drawn,
knowing of the machine only what the trace of one policy tells, by how much tasks, hops and what
lies between tasks take longer than drawn. The second is a prediction of runs not yet seen.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_ext.errors import UsageError
from megatron_ext.simulate.jitter_law import JitterLaw
from megatron_ext.simulate.job import Job
from megatron_ext.simulate.network import Network
from megatron_ext.simulate.pipeline import Pipeline, Policy
from megatron_ext.simulate.replay import Replay
from megatron_ext.simulate.task_times import MeanTimes, TaskTimes, draw_times
from megatron_ext.simulate.traced_run import TracedRun, read_traces


def drawn_times(args: argparse.Namespace, run: TracedRun, seed: int) -> TaskTimes:
    """What the benchmark drew."""
    pipeline = Pipeline(run.stages, run.microbatches)
    means = MeanTimes.of(pipeline, [args.forward_ms], [args.backward_ms])
    return draw_times(pipeline, means, JitterLaw(sigma=args.sigma), Network(), seed)


def longer(args: argparse.Namespace, run: TracedRun) -> tuple[float, float]:
    """By how much forwards and backwards take longer than drawn, on average."""
    forward, backward = [], []
    for seed, batch in enumerate(run.batches):
        drawn = drawn_times(args, run, seed)
        forward.append(np.mean(batch.times.forward - drawn.forward))
        backward.append(np.mean(batch.times.backward - drawn.backward))
    return float(np.mean(forward)), float(np.mean(backward))


def compare(args: argparse.Namespace) -> list[tuple[str, list[float], list[float]]]:
    """Relative errors of both predictions, of every policy."""
    reference = read_traces(args.folder / args.calibrate)
    more_forward, more_backward = longer(args, reference)
    rows = []
    for folder in sorted(args.folder.iterdir()):
        hint, _, limit = folder.name.rpartition("-")
        if not limit.endswith("p"):
            continue  # runs of several iterations, which the benchmark names otherwise
        policy, run = Policy(hint, limit), read_traces(folder)
        measured = [batch.makespan for batch in run.batches]
        pipeline = Pipeline(run.stages, run.microbatches, task_overhead=run.task_overhead)
        own = Replay(run, pipeline, Network(latency=run.hop_latency), 0.5).predict(policy)
        pipeline = Pipeline(run.stages, run.microbatches, task_overhead=reference.task_overhead)
        ahead = []
        for seed in range(len(run.batches)):
            drawn = drawn_times(args, run, seed)
            backward = drawn.backward + more_backward
            times = TaskTimes(drawn.forward + more_forward, backward, backward / 2)
            job = Job(pipeline, network=Network(latency=reference.hop_latency), given=times)
            ahead.append(job.run(job.draw(0), policy).makespan)
        rows.append(
            (
                str(policy),
                [guess / true - 1 for guess, true in zip(own, measured, strict=True)],
                [guess / true - 1 for guess, true in zip(ahead, measured, strict=True)],
            )
        )
    return rows


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="given to the benchmark's --trace")
    parser.add_argument("--sigma", type=float, default=0.3, help="the only one of --sigmas there")
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--backward-ms", type=float, default=20.0)
    parser.add_argument(
        "--calibrate", default="1f1b-p", metavar="POLICY", help="folder to learn the machine from"
    )
    args = parser.parse_args()
    try:
        rows = compare(args)
    except UsageError as error:
        parser.error(str(error))
    table = Table(title="simulated / measured - 1: median (worst) over the runs")
    for column in ("policy", "from its own trace", f"ahead, from {args.calibrate}"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, *errors in rows:
        cells = [f"{statistics.median(e):+.1%} ({max(e, key=abs):+.1%})" for e in errors]
        table.add_row(name, *cells)
    for title, errors in (
        ("median of absolute errors", [statistics.median(map(abs, _all(rows, i))) for i in (1, 2)]),
        ("worst", [max(map(abs, _all(rows, i))) for i in (1, 2)]),
    ):
        table.add_row(title, *(f"{error:.1%}" for error in errors))
    Console(width=100).print(table)
    return 0


def _all(rows: list[tuple[str, list[float], list[float]]], column: int) -> list[float]:
    return [error for row in rows for error in row[column]]


if __name__ == "__main__":
    sys.exit(main())
