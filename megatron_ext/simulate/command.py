"""`megatron-ext simulate`: what a pipeline would take, before it runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ext.progress import ProgressLine
from megatron_ext.simulate import flags
from megatron_ext.simulate.job import Job, Summary, summarize
from megatron_ext.simulate.trace_files import write_traces

add_arguments = flags.add_arguments


def run(args: argparse.Namespace) -> int:
    """Do what the flags ask for.

    Raises:
        UsageError: They do not go together, or a file cannot be used.
    """
    return _simulate(args)


def _simulate(args: argparse.Namespace) -> int:
    """One policy on the job that the flags describe."""
    job, policy = flags.given_job(args), flags.given_policy(args)
    memory, seeds = flags.given_memory(args), flags.given_seeds(args)
    with ProgressLine("simulate", None, "tasks") as progress:
        (summary,) = summarize(
            job,
            [policy],
            seeds,
            baseline=not args.no_baseline,
            on_progress=lambda done, total: progress.update(done, total=total),
        )
    result: dict[str, Any] = asdict(summary)
    result["policy"] = str(policy)
    result["seeds"] = list(seeds)
    if args.trace is not None:
        outcome = job.run(job.draw(seeds[0]), policy, record=True)
        write_traces(args.trace, job.pipeline, policy, outcome)
    peak_gb = memory.peak_gb(summary.peak_live, job.pipeline.chunks, policy)
    if peak_gb:
        result["peak_gb"] = peak_gb
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _show(job, str(policy), summary, peak_gb, len(seeds))
    return 0


def _show(job: Job, policy: str, summary: Summary, peak_gb: float, seeds: int) -> None:
    """Print the result for a reader."""
    pipeline = job.pipeline
    print(
        f"{policy}: {pipeline.stages} stages, {pipeline.microbatches} microbatches, "
        f"{pipeline.ranks} ranks; mean of {seeds} draw{'s' * (seeds > 1)}"
    )
    table = Table(show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("makespan", f"{summary.makespan:.3f}")
    table.add_row("floor (busiest stage)", f"{summary.floor:.3f}")
    table.add_row("floor / makespan", f"{summary.floor_ratio:.1%}")
    table.add_row("critical path", f"{summary.critical_path:.3f}")
    if summary.speedup_vs_1f1b is not None:
        table.add_row("speedup over 1F1B", f"{summary.speedup_vs_1f1b:.3f}x")
    table.add_row("peak live activations", f"{summary.peak_live:.1f}")
    if peak_gb:
        table.add_row("peak memory", f"{peak_gb:.1f} GB")
    for cause, time in summary.idle.items():
        if time:
            table.add_row(f"idle: {cause}", f"{time / summary.makespan:.1%}")
    Console().print(table)
