"""What we add to the wandb run that Megatron makes: our settings, tags, and a summary.

Megatron makes the run on the last rank and logs to it; the metrics of ours are logged where they
are measured. A summary is brought up to date at every log, so that a run that dies has one too.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_ext import __version__, arguments
from megatron_ext.errors import UsageError
from megatron_ext.pipeline.hints import find_hint
from megatron_ext.pipeline.metrics import BATCH_MS, BUBBLE_FRACTION, LIVE_PEAK, UPDATE_WAIT_MS

LONGEST_TAG = 64
"""wandb refuses longer ones."""

MEAN_BUBBLE_FRACTION = "rrfp/mean bubble fraction"
MEAN_BATCH_MS = "rrfp/mean batch (ms)"
PEAK_LIVE = "rrfp/peak live"
MEASURED_ITERATIONS = "rrfp/measured iterations"
MEAN_UPDATE_WAIT_MS = "pipedream-2bw/mean update wait (ms)"
DELAYED_ITERATIONS = "pipedream-2bw/delayed iterations"


def check(args: argparse.Namespace) -> None:
    """Refuse what Megatron would end with a traceback for.

    Raises:
        UsageError: A flag is missing beside --wandb-project.
    """
    if not getattr(args, "wandb_project", ""):
        return
    if not args.wandb_exp_name:
        raise UsageError("--wandb-project needs a name for this run: add --wandb-exp-name NAME")
    if not (args.wandb_save_dir or args.save):
        raise UsageError("--wandb-project needs a folder: add --wandb-save-dir DIR, or --save DIR")


def explain(error: Exception) -> UsageError | None:
    """What an error of wandb's means for whoever started the run; None if it is not wandb's."""
    if not type(error).__module__.startswith("wandb"):
        return None
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    reason = reason.partition(" Use `wandb login`")[0].rstrip(".")
    return UsageError(
        f"--wandb-project: wandb does not start ({reason}): type `wandb login`, set WANDB_API_KEY, "
        "or set WANDB_MODE=offline and `wandb sync` the run later"
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Our settings as they are in force, defaults filled in, for the run's config."""
    found: dict[str, Any] = {"version": __version__, "schedule": args.pipeline_schedule}
    if (rrfp := arguments.rrfp_config(args)) is not None:
        hint = find_hint(rrfp.hint)
        found["rrfp"] = dataclasses.asdict(rrfp) | {
            "live_limit": rrfp.live_limit or hint.live_limit,
            "splits_weight": hint.splits_weight,
            "trace": args.rrfp_trace,
        }
    for name, config in (
        ("pipedream_2bw", arguments.pipedream_2bw_config(args)),
        ("collapse", arguments.collapse_config(args)),
    ):
        if config is not None:
            found[name] = dataclasses.asdict(config)
    if args.rrfp_jitter:
        found["jitter"] = args.rrfp_jitter
    return found


def tags(args: argparse.Namespace) -> tuple[str, ...]:
    """Words to find the run by: what is on, and the hint."""
    found = []
    if (rrfp := arguments.rrfp_config(args)) is not None:
        found += ["rrfp", rrfp.hint[:LONGEST_TAG]]
    if args.pipedream_2bw:
        found.append("2bw")
    if args.collapse_reference:
        found.append("collapse")
    if args.rrfp_jitter:
        found.append("jitter")
    return tuple(found)


def describe(run: Any, args: argparse.Namespace) -> None:
    """Put our settings and tags into a run.

    Args:
        run: wandb's.
        args: Megatron's validated arguments with our flags in them.
    """
    ours = tags(args)
    if not ours:  # a run of Megatron's alone stays as Megatron makes it
        return
    # A run that goes on has had them before, and a flag may have changed in between.
    run.config.update({"megatron_ext": settings(args)}, allow_val_change=True)
    run.tags = tuple(dict.fromkeys((*(run.tags or ()), *ours)))


class PipelineSummary:
    """Means and maxima of the pipeline's metrics over the whole run.

    Args:
        summary: Of wandb's run. One that goes on with an earlier run has that run's figures, and
            they are taken in.
    """

    def __init__(self, summary: Any) -> None:
        self._summary = summary
        self._means: dict[str, tuple[float, int]] = {}
        for name, count in (
            (MEAN_BUBBLE_FRACTION, MEASURED_ITERATIONS),
            (MEAN_BATCH_MS, MEASURED_ITERATIONS),
            (MEAN_UPDATE_WAIT_MS, DELAYED_ITERATIONS),
        ):
            mean, iterations = summary.get(name), summary.get(count)
            if isinstance(mean, int | float) and isinstance(iterations, int | float):
                self._means[name] = float(mean), int(iterations)
        self._peak = float(summary.get(PEAK_LIVE) or 0)

    def take(self, metrics: Mapping[str, float], iterations: int) -> None:
        """Take in the metrics of a log interval.

        Args:
            metrics: By name, as logged.
            iterations: Number of iterations that they are the means of.
        """
        update: dict[str, float] = {}
        for name, mean, count in (
            (BUBBLE_FRACTION, MEAN_BUBBLE_FRACTION, MEASURED_ITERATIONS),
            (BATCH_MS, MEAN_BATCH_MS, MEASURED_ITERATIONS),
            (UPDATE_WAIT_MS, MEAN_UPDATE_WAIT_MS, DELAYED_ITERATIONS),
        ):
            if name not in metrics:
                continue
            before, seen = self._means.get(mean, (0.0, 0))
            seen += iterations
            value = before + (metrics[name] - before) * iterations / seen
            self._means[mean] = value, seen
            update |= {mean: value, count: seen}
        self._peak = max(self._peak, metrics.get(LIVE_PEAK, 0.0))
        update[PEAK_LIVE] = self._peak
        self._summary.update(update)
