"""Sections of a report that come from the traces: where time, messages and memory went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from megatron_ext.pipeline.hints import HINTS
from megatron_ext.pipeline.task import Kind
from megatron_ext.report.blocks import (
    Block,
    Note,
    Pair,
    Paragraph,
    Picture,
    Section,
    Table,
    duration,
    number,
    percent,
    size,
)
from megatron_ext.report.messages import message_times, quantiles
from megatron_ext.report.run import Run
from megatron_ext.report.svg import Bar, stacked_bars
from megatron_ext.report.timeline import CAUSE_NAMES, timeline
from megatron_ext.report.weight_lag import batch_lags
from megatron_ext.simulate.outcome import Cause
from megatron_ext.simulate.rank_trace import RankTrace

_FOLDED_ABOVE = 16  # rows

_CAUSE_HELP = {
    Cause.FILL: "has run nothing yet of a batch that starts with an empty pipeline",
    Cause.FORWARD: "waited for an activation, and it came",
    Cause.BACKWARD: "waited for a gradient, and could have started a forward had it had one",
    Cause.MEMORY: "waited for a gradient, and the live limit let no forward start",
    Cause.AGREEMENT: "decided, or did anything else between two tasks that it could have run at "
    "once",
    Cause.UPDATE: "ran the optimizer, reduced gradients, waited for either, or was in Megatron's "
    "loop between iterations",
    Cause.DRAIN: "had run all forwards of a batch that empties the pipeline",
}


def timeline_section(runs: Sequence[Run]) -> Section:
    """Every task of every stage."""
    section = Section("timeline", "Timeline")
    for index, run in enumerate(runs):
        if run.iterations:
            heading = run.name if len(runs) > 1 else ""
            section.blocks.append(timeline(run, f"timeline-{index}", heading))
    return section


def idle_section(runs: Sequence[Run]) -> Section:
    """Why stages computed nothing."""
    section = Section("idle", "Idle time by cause")
    runs = [run for run in runs if run.iterations]
    means = {
        cause: [
            statistics.fmean(time.by_cause[cause] / (time.whole or 1) for time in run.times)
            for run in runs
        ]
        for cause in Cause
    }
    rows = [
        [CAUSE_NAMES[cause], *(percent(share) for share in means[cause]), _CAUSE_HELP[cause]]
        for cause in Cause
        if cause in _CAUSE_HELP and any(means[cause])
    ]
    rows.append(["all idle", *(percent(run.idle_share) for run in runs), ""])
    rows.append(["in tasks", *(percent(1 - (run.idle_share or 0)) for run in runs), ""])
    section.blocks.append(
        Table(
            "Share of a stage's time, mean over the stages",
            ["cause", *(run.name for run in runs), "the stage"],
            rows,
            is_text=True,
        )
    )
    keys = [("k-busy", "in tasks")] + [
        (f"c-{cause.name.lower()}", CAUSE_NAMES[cause]) for cause in Cause if any(means[cause])
    ]
    pictures = []
    for run in runs:
        bars = [
            Bar(
                run.label(rank),
                [
                    ("k-busy", time.busy, "in tasks"),
                    *((f"c-{c.name.lower()}", time.by_cause[c], CAUSE_NAMES[c]) for c in Cause),
                ],
            )
            for rank, time in zip(run.ranks, run.times, strict=True)
        ]
        caption = f"Where the time of every stage of {run.name} went."
        pictures.append(Picture(stacked_bars(bars, caption), caption, keys))
    section.blocks.append(Pair(pictures))
    shown = [cause for cause in Cause if any(means[cause])]
    section.blocks += [
        Table(
            f"{run.name}: idle time of every stage",
            ["stage", "in tasks", *(CAUSE_NAMES[cause] for cause in shown)],
            [
                [
                    run.label(rank),
                    percent(time.busy / (time.whole or 1)),
                    *(percent(time.by_cause[cause] / (time.whole or 1)) for cause in shown),
                ]
                for rank, time in zip(run.ranks, run.times, strict=True)
            ],
            folded=True,
        )
        for run in runs
    ]
    return section


def tasks_section(runs: Sequence[Run]) -> Section:
    """How long tasks took and how much was held."""
    section = Section("stages", "Tasks and live microbatches")
    tables: list[Block] = []
    over_limit: list[Block] = []
    for run in runs:
        if not run.iterations:
            continue
        rows = []
        for rank in run.ranks:
            limit = run.live_limit(rank)
            cells = [run.label(rank)]
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT):
                times = [one.ended - one.started for one in rank.all_tasks if one.task.kind is kind]
                median, high = quantiles(times, (0.5, 0.99))
                cells.append(f"{duration(median)} / {duration(high)}" if times else number(None))
            cells += [number(_mean_live(rank)), number(rank.peak_live, 0), number(limit, 0)]
            rows.append(cells)
        tables.append(
            Table(
                f"{run.name}: median and 99th percentile of task times; activations held",
                ["stage", "forward", "backward", "weight gradient", "held, mean", "peak", "limit"],
                rows,
                folded=len(rows) > _FOLDED_ABOVE,
            )
        )
        over = [
            run.label(rank)
            for rank in run.ranks
            if (limit := run.live_limit(rank)) is not None
            and not _fixed_order(run)
            and rank.peak_live > limit
        ]
        if over:
            over_limit.append(
                Note(f"{run.name}: above the live limit: {', '.join(over)}.", "alarm")
            )
    section.blocks.append(Pair(tables))
    section.blocks += over_limit
    section.blocks.append(
        Paragraph(
            "Held are the activations of microbatches, one per model chunk, from the forward to "
            "the backward, or to the weight gradient where that is a task of its own. The timeline "
            "shows them below the tasks, against the limit of --rrfp-live-limit."
        )
    )
    return section


def messages_section(runs: Sequence[Run]) -> Section:
    """How long messages took."""
    section = Section("messages", "Messages between stages")
    rows = []
    for run in runs:
        if not run.iterations:
            continue
        for direction, times in message_times(run.ranks).items():
            for what, values in (("latency", times.latency), ("age when used", times.age)):
                found = quantiles(values, (0.5, 0.9, 0.99, 1.0))
                row = [f"{direction.payload}s, {what}", run.name, number(len(values), 0)]
                rows.append([*row, *(duration(value) for value in found)])
    rows.sort(key=lambda row: row[0])
    columns = ["message", "run", "count", "median", "90 %", "99 %", "longest"]
    if len(runs) == 1:
        rows = [[row[0], *row[2:]] for row in rows]
        columns.remove("run")
    section.blocks = [
        Table("Times of messages", columns, rows),
        Paragraph(
            "Latency: from the end of the task that sent a message to its arrival. Age: from there "
            "to the task that used it; where it is high, the receiving stage holds others up."
        ),
    ]
    return section


def decisions_section(runs: Sequence[Run]) -> Section:
    """What choosing tasks cost."""
    section = Section("decisions", "Dispatch and agreement")
    tables: list[Block] = []
    for run in runs:
        if not run.iterations:
            continue
        rows = []
        for rank, time in zip(run.ranks, run.times, strict=True):
            details = [rank.details[number] for number in run.iterations]
            cells = [run.label(rank), number(sum(int(d.get("decisions", 0)) for d in details), 0)]
            for name in ("dispatch", "agreement"):
                medians = [
                    float(d[f"{name} median (us)"]) for d in details if f"{name} median (us)" in d
                ]
                worst = [float(d[f"{name} p99 (us)"]) for d in details if f"{name} p99 (us)" in d]
                cells.append(
                    duration(statistics.median(medians) / 1e3) if medians else number(None)
                )
                cells.append(duration(max(worst) / 1e3) if worst else number(None))
            total = sum(float(d.get("dispatch total (us)", 0)) for d in details) / 1e3
            cells.append(percent(total / (time.whole or 1), 2))
            rows.append(cells)
        if not any(row[1] != "0" for row in rows):
            tables.append(
                Paragraph(f"{run.name}: these traces do not say how long decisions took.")
            )
            continue
        tables.append(
            Table(
                f"{run.name}: time to choose a task",
                [
                    "stage", "decisions", "dispatch, median", "worst 99 %",
                    "agreement, median", "worst 99 %", "share of time",
                ],
                rows,
                folded=len(rows) > _FOLDED_ABOVE,
            )
        )  # fmt: skip
    section.blocks.append(Pair(tables))
    section.blocks.append(
        Paragraph(
            "Dispatch is the time to choose a task; agreement is the same where ranks that share "
            "collectives choose together. Median over the iterations, and the worst 99th "
            "percentile of an iteration."
        )
    )
    return section


def weights_section(runs: Sequence[Run]) -> Section:
    """How old the weights were."""
    section = Section("weights", "Weights and updates")
    for run in runs:
        lags = batch_lags(run.ranks)
        if not lags:
            continue
        if not any(lag.lag or lag.update_after is not None for lag in lags):
            section.blocks.append(
                Paragraph(
                    f"{run.name}: the pipeline drained after every batch, and every batch computed "
                    "on the newest weights (lag 0). Updates ran between the iterations."
                )
            )
            continue
        rows = [
            [
                str(lag.iteration),
                str(lag.lag),
                duration(lag.update_after),
                number(lag.ran_meanwhile, 0),
                percent(lag.ran_meanwhile / lag.tasks if lag.tasks else None),
            ]
            for lag in lags
        ]
        section.blocks.append(
            Table(
                f"{run.name}: version lag of every batch",
                [
                    "iteration", "weights lag by updates", "last task to end of update",
                    "next batch's tasks before that", "of all tasks in that time",
                ],
                rows,
                folded=len(rows) > _FOLDED_ABOVE,
            )
        )  # fmt: skip
        section.blocks.append(
            Paragraph(
                f"{run.name}: with two weight versions a batch computes on the weights that were "
                "newest when the batch before it began: a lag of 1. Times are the longest of any "
                "stage; the tasks of the next batch are those that a flush would have delayed."
            )
        )
    return section


def memory_section(runs: Sequence[Run]) -> Section:
    """How much memory ranks took."""
    section = Section("memory", "Memory")
    tables: list[Block] = []
    for run in runs:
        ranks = [rank for rank in run.ranks if "memory" in rank.about]
        rows = []
        for rank in ranks:
            values = [
                int(rank.details[number]["memory (bytes)"])
                for number in sorted(rank.details)
                if "memory (bytes)" in rank.details[number]
            ]
            if values:
                rows.append([run.label(rank), size(values[0]), size(values[-1])])
        if rows:
            what = str(ranks[0].about["memory"])
            tables.append(
                Table(
                    f"{run.name}: {what}",
                    ["stage", "after the first traced batch", "after the last one"],
                    rows,
                    folded=len(rows) > _FOLDED_ABOVE,
                )
            )
        else:
            tables.append(Paragraph(f"{run.name}: no memory was traced."))
    section.blocks.append(Pair(tables))
    return section


def iterations_section(runs: Sequence[Run]) -> Section:
    """How long every iteration took."""
    section = Section("iterations", "Iterations")
    tables: list[Block] = []
    for run in runs:
        if not run.iterations:
            continue
        tables.append(
            Table(
                f"{run.name}: traced iterations, first stage's start to last one's end",
                ["iteration", "time", "microbatches"],
                [
                    [str(iteration), duration(time), _microbatches(run, iteration)]
                    for iteration, time in zip(run.iterations, run.batch_ms, strict=True)
                ],
                folded=len(run.iterations) > _FOLDED_ABOVE,
            )
        )
    section.blocks.append(Pair(tables))
    return section


def _microbatches(run: Run, iteration: int) -> str:
    details = run.ranks[0].details[iteration]
    given = details.get("microbatches")
    return number(int(given) if given is not None else None, 0)


def _fixed_order(run: Run) -> bool:
    hint = HINTS.get(str(run.settings.get("hint")))
    return hint is not None and hint.fixed_order


def _mean_live(rank: RankTrace) -> float | None:
    """Mean over the time of the batches, of what was held."""
    total = whole = 0.0
    for (at, value), (following, _) in pairwise(rank.live):
        total += value * (following - at)
        whole += following - at
    return total / whole if whole else None
