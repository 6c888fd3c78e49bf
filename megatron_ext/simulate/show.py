"""Results for a reader."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from megatron_ext.simulate.job import Summary
from megatron_ext.simulate.pipeline import Pipeline, Policy
from megatron_ext.simulate.recommend import Candidate
from megatron_ext.simulate.replay import Replay

_SHOWN = 15  # the rest is in --json


def show_summary(
    pipeline: Pipeline, policy: Policy, summary: Summary, peak_gb: float, seeds: int
) -> None:
    """Print the result of one policy."""
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


def show_candidates(pipeline: Pipeline, found: list[Candidate], always: list[Policy]) -> None:
    """Print what the fastest policies would give, and those in `always`."""
    table = Table()
    for column in ("policy", "ms/iteration", "speedup", "of the floor", "peak live", "GB"):
        justify = "left" if column == "policy" else "right"
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    ranked = sorted(found, key=lambda one: one.summary.makespan)
    for place, one in enumerate(ranked):
        if place >= _SHOWN and one.policy not in always:
            continue
        summary = one.summary
        speedup = summary.speedup_vs_1f1b
        table.add_row(
            str(one.policy),
            f"{summary.makespan / pipeline.iterations:.1f}",
            "-" if speedup is None else f"{speedup:.3f}x",
            f"{summary.floor_ratio:.1%}",
            f"{summary.peak_live:.0f}",
            f"{one.peak_gb:.1f}" if one.peak_gb else "-",
        )
    Console().print(table)


def replay_text(replay: Replay, ran: Policy, measured: list[float], predicted: list[float]) -> str:
    """What was traced, and how well the simulation predicts it."""
    run = replay.run
    errors = [abs(guess / true - 1) for guess, true in zip(predicted, measured, strict=True)]
    return (
        f"{len(measured)} traced iterations of {run.stages} stages, {run.microbatches} "
        f"microbatches, under {ran}\n"
        f"task overhead {replay.pipeline.task_overhead:.3f} ms, "
        f"hop latency {replay.network.latency:.3f} ms\n"
        f"measured {statistics.fmean(measured):.1f} ms per iteration, predicted "
        f"{statistics.fmean(predicted):.1f}; error {statistics.median(errors):.1%} median, "
        f"{max(errors):.1%} worst"
    )


def advice_text(best: Candidate, tried: int) -> str:
    """The flags to use, and what they give."""
    summary = best.summary
    speedup = summary.speedup_vs_1f1b
    against = "" if speedup is None else f", {speedup:.2f}x over 1F1B"
    return (
        f"{best.flags}\n"
        f"# {summary.floor_ratio:.1%} of the floor{against}; {best.peak_gb:.1f} GB; best of "
        f"{tried} policies"
    )
