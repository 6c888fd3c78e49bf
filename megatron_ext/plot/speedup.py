"""Simulated speedup over 1F1B against jitter, one line per policy."""

from __future__ import annotations

import argparse

from matplotlib.figure import Figure

from megatron_ext.errors import UsageError
from megatron_ext.plot.picture import INK
from megatron_ext.progress import ProgressLine
from megatron_ext.simulate.flags import numbers
from megatron_ext.simulate.jitter_law import JitterLaw
from megatron_ext.simulate.job import Job, summarize
from megatron_ext.simulate.network import Network
from megatron_ext.simulate.pipeline import Pipeline, Policy
from megatron_ext.simulate.task_times import MeanTimes

_STYLES = ("-", "--", "-.", ":")
_DEFAULT = "bfw-room:p,bfw-room:1.5p,bfw-room:1.5p:2bw,bf:p,bf:2p,1f1b:2p,1f1b:p:2bw"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this kind."""
    parser.add_argument("--stages", type=int, default=8, help="pipeline depth")
    parser.add_argument("--microbatches", type=int, default=64, help="per batch")
    parser.add_argument("--iterations", type=int, default=4, help="batches, one after the other")
    parser.add_argument("--forward", type=float, default=1.0, help="mean time of a forward")
    parser.add_argument("--backward", type=float, default=2.0, help="the same")
    parser.add_argument("--hop-latency", type=float, default=0.0, help="of a message")
    parser.add_argument(
        "--sigmas",
        type=numbers,
        default=[0.0, 0.1, 0.2, 0.3, 0.45, 0.6],
        metavar="S,S,...",
        help="how much times vary, lognormal",
    )
    parser.add_argument(
        "--policies",
        default=_DEFAULT,
        metavar="HINT:LIMIT[:2bw],...",
        help=f"lines to draw (default {_DEFAULT})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    parser.add_argument("--seeds", type=int, default=5, help="draws to average over")


def parse_policies(text: str) -> list[Policy]:
    """Read ``HINT:LIMIT[:2bw]`` separated by commas.

    Raises:
        UsageError: One has another form.
    """
    policies = []
    for item in text.split(","):
        words = item.strip().split(":")
        continuous = len(words) > 1 and words[-1] == "2bw"
        words = words[:-1] if continuous else words
        if len(words) < 2 or not all(words):
            raise UsageError(f"--policies {item!r} is not HINT:LIMIT or HINT:LIMIT:2bw")
        policies.append(Policy(":".join(words[:-1]), words[-1], continuous))
    return policies


def draw(args: argparse.Namespace) -> Figure:
    """Simulate and draw.

    Raises:
        UsageError: A flag is out of range.
    """
    policies = parse_policies(args.policies)
    if args.seed < 0 or args.seeds < 1:
        raise UsageError("--seed must not be negative, and --seeds at least 1")
    pipeline = Pipeline(args.stages, args.microbatches, iterations=args.iterations)
    means = MeanTimes.of(pipeline, [args.forward], [args.backward])
    network = Network(latency=args.hop_latency)
    lines: list[list[float]] = [[] for _ in policies]
    floor = []
    seeds = range(args.seed, args.seed + args.seeds)
    with ProgressLine("plot", len(args.sigmas), "sigmas") as progress:
        for done, sigma in enumerate(args.sigmas):
            law = JitterLaw.parse(f"lognormal:{sigma}")
            found = summarize(Job(pipeline, means, law, network), policies, seeds)
            for line, summary in zip(lines, found, strict=True):
                assert summary.speedup_vs_1f1b is not None
                line.append(summary.speedup_vs_1f1b)
            assert found[0].speedup_vs_1f1b is not None
            floor.append(found[0].speedup_vs_1f1b / found[0].floor_ratio)
            progress.update(done + 1)
    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    for index, (policy, line) in enumerate(zip(policies, lines, strict=True)):
        axes.plot(args.sigmas, line, _STYLES[index % len(_STYLES)], marker=".", label=str(policy))
    axes.plot(args.sigmas, floor, color=INK, lw=1, label="floor: the busiest stage")
    axes.axhline(1, color=INK, lw=0.5)
    axes.set_xlabel("lognormal sigma of task times")
    axes.set_ylabel("speedup over 1F1B")
    axes.set_title(
        f"{args.stages} stages, {args.microbatches} microbatches, message {args.hop_latency:g}",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
