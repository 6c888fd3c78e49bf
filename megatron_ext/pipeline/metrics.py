"""What a pipeline cost per log interval: one figure per stage, gathered to the last rank.

Every stage keeps sums over the interval. At its end one small collective brings them to the
pipeline's last stage, where Megatron's TensorBoard and wandb writers are; with several replicas
that is the pipeline of the last rank, and the others do nothing.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_ext.pipeline.batch_statistics import BatchStatistics
from megatron_ext.pipeline.task import Kind
from megatron_ext.pipeline.transport.gloo import make_group

NONE = math.nan
"""A figure that a stage does not have."""


@dataclass
class Interval:
    """Sums over the training batches of a log interval, on one stage."""

    batches: int = 0
    batch_s: float = 0.0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    peak_live: int = 0
    dispatch_s: list[float] = field(default_factory=list)
    agreement_s: list[float] = field(default_factory=list)
    message_age_s: list[float] = field(default_factory=list)
    tasks_s: dict[int, list[float]] = field(default_factory=dict)
    update_s: list[float] = field(default_factory=list)
    update_wait_s: list[float] = field(default_factory=list)
    version_lag: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)

    def add(self, batch: BatchStatistics) -> None:
        """Take a batch in."""
        self.batches += 1
        self.batch_s += batch.seconds
        self.busy_s += batch.busy_s
        self.waiting_s += batch.waiting_s
        self.peak_live = max(self.peak_live, batch.peak_live)
        self.dispatch_s += batch.dispatch_s
        self.agreement_s += batch.agreement_s
        self.message_age_s += batch.message_ages_s()
        for (kind, *_), started, ended in batch.tasks:
            self.tasks_s.setdefault(kind, []).append(ended - started)
        if batch.updates:
            seconds = sum(span.seconds for span in batch.updates)
            self.tasks_s.setdefault(Kind.UPDATE, []).append(seconds)
        if (update := batch.delayed_update) is not None:
            self.update_s.append(update.ended - update.began)
            self.update_wait_s.append(batch.update_wait_s())
            self.version_lag.append(update.version_lag)
            if update.grad_norm is not None:
                self.grad_norm.append(update.grad_norm)

    def figures(self) -> list[float]:
        """One number per entry of `FIGURES`, before the busy time becomes a bubble fraction."""
        return [
            self.busy_s,
            self.batch_s,
            self.peak_live,
            _median(self.dispatch_s) * 1e6,
            _median(self.agreement_s) * 1e6,
            self.waiting_s / self.batches * 1e3 if self.batches else NONE,
            _mean(self.message_age_s) * 1e3,
            *(_mean(self.tasks_s.get(kind, [])) * 1e3 for kind in Kind),
            _mean(self.update_s) * 1e3,
            _mean(self.update_wait_s) * 1e3,
            max(self.version_lag, default=NONE),
            _mean(self.grad_norm),
        ]


BUBBLE_FRACTION, LIVE_PEAK = "rrfp/bubble fraction", "rrfp/live peak"
BATCH_MS = "rrfp/batch (ms)"
VERSION_LAG = "pipedream-2bw/version lag (updates)"
UPDATE_WAIT_MS = "pipedream-2bw/update wait (ms)"

FIGURES = (
    BUBBLE_FRACTION,
    BATCH_MS,
    LIVE_PEAK,
    "rrfp/dispatch (us)",
    "rrfp/agreement (us)",
    "rrfp/message wait (ms)",
    "rrfp/message age (ms)",
    *(f"rrfp/{kind.name.lower()} (ms)" for kind in Kind),
    "pipedream-2bw/update latency (ms)",
    UPDATE_WAIT_MS,
    VERSION_LAG,
    "pipedream-2bw/grad norm",
)
"""What is logged, as ``NAME`` over all stages and ``NAME/stage I`` of each one."""


def report(stages: list[list[float]], batches: int) -> dict[str, float]:
    """The metrics of a pipeline by name.

    Args:
        stages: `Interval.figures` of every stage, in order.
        batches: Number of batches in the interval.

    Returns:
        The figure of every stage, and over all stages the mean, of the live peak and the version
        lag the maximum.
        Figures that no stage has are left out.
    """
    # A stage is done earlier or later than the next one; the batch is over when all of them are.
    longest = max(batch_s for _, batch_s, *_ in stages)
    columns = list(zip(*stages, strict=True))
    columns[0] = tuple(1 - busy_s / longest for busy_s in columns[0])
    columns[1] = tuple(batch_s / batches * 1e3 for batch_s in columns[1])
    metrics: dict[str, float] = {}
    for name, column in zip(FIGURES, columns, strict=True):
        present = {i: value for i, value in enumerate(column) if not math.isnan(value)}
        if not present:
            continue
        over_all = max if name in (LIVE_PEAK, VERSION_LAG) else statistics.fmean
        metrics[name] = over_all(present.values())
        metrics |= {f"{name}/stage {i}": value for i, value in present.items()}
    return metrics


class Metrics:
    """Adds up the batches of one stage and gathers those of all stages.

    Args:
        pipeline: The ranks of this pipeline, stage by stage.
        timeout_s: How long to wait for another stage.
    """

    def __init__(self, pipeline: list[int], *, timeout_s: float) -> None:
        self._interval = Interval()
        self.batches = 0
        """In the interval that was gathered last."""
        self._stages = len(pipeline)
        self._last = pipeline[-1]
        # The executor's transport has a group of its own, which nothing else may use.
        is_logged = self._last == dist.get_world_size() - 1
        self._group = make_group(pipeline, timeout_s) if is_logged else None

    def add(self, batch: BatchStatistics) -> None:
        """Count one more training batch."""
        if self._group is not None:
            self._interval.add(batch)

    def gather(self) -> dict[str, float]:
        """End the interval; every stage must call this.

        Returns:
            On the last rank the metrics by name; elsewhere {}.
        """
        if self._group is None:
            return {}
        interval, self._interval = self._interval, Interval()
        self.batches = interval.batches
        mine = torch.tensor(interval.figures(), dtype=torch.float64)
        is_last = dist.get_rank() == self._last
        stages = [torch.empty_like(mine) for _ in range(self._stages)] if is_last else None
        dist.gather(mine, stages, dst=self._last, group=self._group)
        return report([stage.tolist() for stage in stages], interval.batches) if stages else {}


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else NONE


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else NONE
