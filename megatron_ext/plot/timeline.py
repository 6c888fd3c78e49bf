"""The timeline of a run, from the traces that its ranks, or a simulation, wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.task import Kind
from megatron_ext.plot.picture import FILL, INK, NAME
from megatron_ext.simulate.rank_trace import RankTrace, read_rank

_INCHES_WIDE = 12.0
_INCHES_PER_STAGE = 0.32
_FEWEST_UNITS_PER_LABEL = 0.012  # of the picture's width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this kind."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="traces of --rrfp-trace or of simulate --trace"
    )
    parser.add_argument("--first", type=int, metavar="N", help="first iteration to draw, from 1")
    parser.add_argument("--last", type=int, metavar="N", help="last iteration to draw")


def draw(args: argparse.Namespace) -> Figure:
    """Draw one pipeline, the one of the first rank.

    Raises:
        UsageError: There are no traces, or none of these iterations.
    """
    ranks = read_rank(args.folder)
    pipeline = ranks[min(ranks)].pipeline
    missing = [rank for rank in pipeline if rank not in ranks]
    if missing:
        raise UsageError(f"{args.folder}: there is no trace of rank {missing[0]}")
    stages = [ranks[rank] for rank in pipeline]
    known = sorted({iteration for trace in stages for iteration in trace.batches})
    first = args.first if args.first is not None else (known[0] if known else 1)
    last = args.last if args.last is not None else (known[-1] if known else 1)
    if not [number for number in known if first <= number <= last]:
        span = f"{known[0]} to {known[-1]}" if known else "none"
        raise UsageError(f"{args.folder} holds iterations {span}, not {first} to {last}")
    figure = Figure(figsize=(_INCHES_WIDE, 1.2 + _INCHES_PER_STAGE * len(stages)))
    axes = figure.subplots()
    begin = min(start for trace in stages for start, _ in _batches(trace, first, last))
    end = max(end for trace in stages for _, end in _batches(trace, first, last))
    for stage, trace in enumerate(stages):
        _draw_stage(axes, stage, trace, begin, end)
    axes.set_xlim(0, end - begin)
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
    axes.set_xlabel("ms")
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=FILL[kind], label=NAME[kind]) for kind in Kind if kind in FILL]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    return figure


def _batches(trace: RankTrace, first: int, last: int) -> list[tuple[float, float]]:
    return [span for iteration, span in trace.batches.items() if first <= iteration <= last]


def _draw_stage(axes: Axes, stage: int, trace: RankTrace, begin: float, end: float) -> None:
    """One row of bars, with microbatch numbers where there is room."""
    for kind, fill in FILL.items():
        ran = [
            (one.started - begin, one.ended - one.started, one.task.microbatch)
            for one in trace.all_tasks
            if one.task.kind is kind and begin <= one.started and one.ended <= end
        ]
        bars = [(start, length) for start, length, _ in ran]
        axes.broken_barh(bars, (stage - 0.4, 0.8), facecolors=fill, edgecolor="white", lw=0.3)
        for start, length, microbatch in ran:
            if length > _FEWEST_UNITS_PER_LABEL * (end - begin):
                axes.text(
                    start + length / 2, stage, str(microbatch), color="white", fontsize=6,
                    ha="center", va="center", clip_on=True,
                )  # fmt: skip
