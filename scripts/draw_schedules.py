"""Draw one batch under Megatron's 1F1B and under RRFP, for the same task durations.

    python scripts/draw_schedules.py --out docs/schedules.svg

Nothing is drawn by hand: both orders come from the arbiter and the hints that training uses, driven
by one small event loop in which messages take no time. Of many random batches it draws the one
whose speedup is the median.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.hints import HINTS, Place
from megatron_ext.pipeline.live_limit import parse_live_limit, tapered
from megatron_ext.pipeline.task import Direction, Kind, Task

FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT

FILL = {FORWARD: "#2f6fbd", BACKWARD: "#2c8a57", WEIGHT: "#8a5bb0"}
NAME = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradient"}
WAITING = "#d9822b"
INK = "#747c86"  # as far from white as from a dark page

Durations = dict[tuple[int, Task], float]


@dataclass(frozen=True)
class Span:
    """A task of a stage and the time it took."""

    stage: int
    task: Task
    start: float
    end: float


def run(args: argparse.Namespace, hint_name: str, limit: str, durations: Durations) -> list[Span]:
    """Run one batch and return what every stage did, in order of completion.

    Where the hint makes a task of the weight gradient, it takes half of the backward's time.
    """
    hint = HINTS[hint_name]
    stages = []
    for stage in range(args.stages):
        live_limit = parse_live_limit(limit, args.stages)
        if hint.tapers:
            live_limit = tapered(live_limit, stage, args.stages)
        place = Place(stage, args.stages, args.microbatches, live_limit)
        stages.append(Arbiter(place, hint(place)))
    spans: list[Span] = []
    running: list[tuple[float, int, Task, float]] = []
    idle = set(range(args.stages))
    now = 0.0
    while True:
        for stage in sorted(idle):
            if task := stages[stage].choose():
                idle.remove(stage)
                whole = durations[stage, task._replace(kind=min(task.kind, BACKWARD))]
                length = whole / 2 if hint.splits_weight and task.kind != FORWARD else whole
                length /= hint.weight_pieces if task.kind == WEIGHT else 1
                heapq.heappush(running, (now + length, stage, task, now))
        if not running:
            return spans
        now = running[0][0]
        while running and running[0][0] == now:
            _, stage, task, start = heapq.heappop(running)
            idle.add(stage)
            spans.append(Span(stage, task, start, now))
            stages[stage].completed(task)
            neighbour = stage + (1 if task.kind == FORWARD else -1)
            if task.kind != WEIGHT and 0 <= neighbour < args.stages:
                stages[neighbour].arrived(Direction(task.kind), task.microbatch)


def draw_durations(args: argparse.Namespace, seed: int) -> Durations:
    """Lognormal durations, independent of each other: forwards of mean 1, backwards of mean 2."""
    generator = random.Random(seed)
    return {
        (stage, Task(kind, microbatch)): mean
        * generator.lognormvariate(-(args.sigma**2) / 2, args.sigma)
        for stage in range(args.stages)
        for kind, mean in ((FORWARD, 1.0), (BACKWARD, 2.0))
        for microbatch in range(args.microbatches)
    }


def compare(args: argparse.Namespace, seed: int) -> tuple[list[Span], list[Span]]:
    """The same batch under 1F1B and under RRFP."""
    durations = draw_durations(args, seed)
    return run(args, "1f1b", "p", durations), run(args, args.hint, args.live_limit, durations)


def makespan(spans: Sequence[Span]) -> float:
    """When the last task ended."""
    return max(span.end for span in spans)


def median_seed(args: argparse.Namespace, seeds: int) -> int:
    """The seed, of that many, whose batch has the median speedup."""

    def speedup(seed: int) -> float:
        fixed, ready = compare(args, seed)
        return makespan(fixed) / makespan(ready)

    return sorted(range(seeds), key=speedup)[seeds // 2]


def draw(args: argparse.Namespace) -> Figure:
    """Both schedules, one above the other, on one time axis."""
    seed = median_seed(args, args.seeds)
    schedules = compare(args, seed)
    end = makespan(schedules[0])
    titles = (
        "1F1B: every stage follows a fixed order",
        f"RRFP: every stage runs what is ready (hint {args.hint}, live limit {args.live_limit})",
    )
    height = 0.42 * args.stages + 0.75
    figure = Figure(figsize=(11, 2 * height + 0.5))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, title, spans in zip(panels, titles, schedules, strict=True):
        _draw_schedule(axes, args.stages, spans, end)
        axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold")
    panels[-1].set_xlabel("time, in mean forwards", color=INK, fontsize=10)
    kinds = sorted({span.task.kind for spans in schedules for span in spans})
    patches = [Patch(facecolor=FILL[kind], label=NAME[kind]) for kind in kinds]
    patches.append(Patch(facecolor=WAITING, alpha=0.45, label="waiting (the bubble)"))
    figure.legend(
        handles=patches, loc="lower left", ncols=4, frameon=False, labelcolor=INK, columnspacing=1
    )
    figure.text(
        0.995,
        0.025,
        f"simulated: lognormal durations, sigma {args.sigma:g}; median of {args.seeds} batches",
        ha="right",
        color=INK,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def _draw_schedule(axes: Axes, stages: int, spans: Sequence[Span], end: float) -> None:
    last = makespan(spans)
    axes.barh(range(stages), last, height=0.84, color=WAITING, alpha=0.45, lw=0)
    for span in spans:
        length = span.end - span.start
        fill = FILL[span.task.kind]
        axes.barh(span.stage, length, 0.84, span.start, fc=fill, ec="white", lw=0.6)
        axes.text(
            span.start + length / 2,
            span.stage + 0.03,
            str(span.task.microbatch),
            ha="center",
            va="center",
            color="white",
            fontsize=8.5,
        )
    axes.set_xlim(0, end)
    axes.set_ylim(stages - 0.45, -0.55)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.tick_params(colors=INK, length=0, labelsize=11)
    axes.axvline(last, color=INK, lw=1.2, ls="--", clip_on=False)
    for side in axes.spines.values():
        side.set_visible(False)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the picture and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--sigma", type=float, default=0.3)
    parser.add_argument("--hint", choices=sorted(HINTS), default="bfw-depth")
    parser.add_argument("--live-limit", default="p")
    parser.add_argument("--seeds", type=int, default=99)
    parser.add_argument("--out", type=Path, default=Path("docs/schedules.svg"))
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text, and the same orders give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "schedules"}):
        draw(args).savefig(args.out, transparent=True, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
