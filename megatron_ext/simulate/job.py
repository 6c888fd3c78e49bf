"""A job to simulate: shape, task times and network; runs it under policies and seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from megatron_ext.errors import UsageError
from megatron_ext.simulate.engine import MessageFactors, simulate
from megatron_ext.simulate.floors import busiest_stage, critical_path
from megatron_ext.simulate.jitter_law import Array, JitterLaw
from megatron_ext.simulate.network import Hop, Network
from megatron_ext.simulate.outcome import Cause, Outcome
from megatron_ext.simulate.pipeline import BASELINE, Pipeline, Policy
from megatron_ext.simulate.task_times import MeanTimes, TaskTimes, as_rows, draw_times


@dataclass(frozen=True)
class Memory:
    """What a stage holds, in GB."""

    live_gb: float = 0.0
    """Of a live microbatch, all its chunks on the stage."""
    weights_gb: float = 0.0
    """Of one version of the weights; 2BW holds one more."""
    other_gb: float = 0.0
    """Everything else: the weights in use, gradients, optimizer state."""

    def peak_gb(self, peak_live: float, chunks: int, policy: Policy) -> float:
        """Of the stage that holds most, from its peak of chunk activations."""
        versions = self.weights_gb if policy.pipedream_2bw else 0.0
        return self.other_gb + versions + self.live_gb * peak_live / chunks


@dataclass(frozen=True)
class Draw:
    """Task times and hops of one seed, the same for every policy."""

    times: TaskTimes
    hops: list[tuple[Hop, Hop]]
    message_factors: MessageFactors | None = None


@dataclass(frozen=True)
class Job:
    """Everything but the policy."""

    pipeline: Pipeline
    means: MeanTimes | None = None
    law: JitterLaw = field(default_factory=JitterLaw)
    network: Network = field(default_factory=Network)
    given: TaskTimes | None = None
    """Explicit times instead of means; only slow links then depend on the seed."""
    given_factors: tuple[Array, Array] | None = None
    """On the latency of every activation and gradient, by the sending row."""

    def draw(self, seed: int) -> Draw:
        """Times and hops of a seed; the same seed gives the same numbers."""
        if self.given is not None:
            times = self.given
        else:
            assert self.means is not None
            times = draw_times(self.pipeline, self.means, self.law, self.network, seed)
        links = np.random.default_rng([seed, 1])  # a sequence of its own
        hops = self.network.hops(self.pipeline, self.law, links)
        if self.given_factors is not None:
            activations, gradients = self.given_factors
            return Draw(times, hops, (as_rows(activations), as_rows(gradients)))
        if not self.law.messages:
            return Draw(times, hops)
        law = JitterLaw(sigma=self.law.messages)
        forward, backward = (as_rows(law.factors(links, times.forward.shape)) for _ in range(2))
        return Draw(times, hops, (forward, backward))

    def run(
        self,
        draw: Draw,
        policy: Policy,
        *,
        record: bool = False,
        on_progress: Callable[[int], object] = lambda _: None,
    ) -> Outcome:
        """Run a policy on a draw."""
        return simulate(
            self.pipeline,
            draw.times,
            policy,
            draw.hops,
            message_factors=draw.message_factors,
            blocking=self.network.blocking,
            record=record,
            on_progress=on_progress,
        )

    def tasks(self, policy: Policy) -> int:
        """How many tasks a run has."""
        pipeline = self.pipeline
        kinds = 2 + policy.hint_class.splits_weight * policy.hint_class.weight_pieces
        return kinds * pipeline.pipeline_ranks * pipeline.chunks * pipeline.all_microbatches


@dataclass(frozen=True)
class Summary:
    """Means over the seeds."""

    makespan: float
    floor: float
    """Work of the busiest stage."""
    floor_ratio: float
    """Floor by makespan."""
    critical_path: float
    speedup_vs_1f1b: float | None
    """Against 1F1B at its own memory with a flush after every batch; None if not run."""
    peak_live: float
    """Most chunk activations on any stage."""
    idle: dict[str, float]
    """Mean over the stages, by cause."""


def summarize(
    job: Job,
    policies: list[Policy],
    seeds: range,
    *,
    baseline: bool = True,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Summary]:
    """Run every policy, and 1F1B to compare with, on the same draws.

    Args:
        job: What to run.
        policies: Under which.
        seeds: Of the draws.
        baseline: Whether to run 1F1B too.
        on_progress: Called with how many tasks are done, and are to be done.

    Raises:
        UsageError: A policy does not go with the pipeline.
    """
    for policy in policies:
        policy.check(job.pipeline)
        policy.check_limit(job.pipeline)
    baseline = baseline and _allowed(BASELINE, job.pipeline)
    # The baseline first, and nothing twice.
    every = list(dict.fromkeys([*([BASELINE] if baseline else []), *policies]))
    total = len(seeds) * sum(job.tasks(policy) for policy in every)
    before = 0
    causes = [cause.name.lower() for cause in Cause]
    rows: dict[Policy, list[list[float]]] = {policy: [] for policy in policies}
    for seed in seeds:
        draw = job.draw(seed)
        floor = busiest_stage(job.pipeline, draw.times)
        path = critical_path(job.pipeline, draw.times, draw.hops)
        outcomes: dict[Policy, Outcome] = {}
        for policy in every:
            report = partial(_report, on_progress, before, total)
            outcomes[policy] = job.run(draw, policy, on_progress=report)
            before += job.tasks(policy)
        reference = outcomes[BASELINE].makespan if baseline else math.nan
        for policy in rows:
            outcome = outcomes[policy]
            span = outcome.makespan
            ratios = [floor / span, path, reference / span] if span else [1.0, path, 1.0]
            rows[policy].append(
                [span, floor, *ratios, max(outcome.peak_live), *outcome.idle_by_cause.values()]
            )
    summaries = []
    for policy in policies:
        means = [float(value) for value in np.mean(rows[policy], axis=0)]
        makespan, floor, ratio, path, speedup, peak, *idle = means
        summaries.append(
            Summary(
                makespan=makespan,
                floor=floor,
                floor_ratio=ratio,
                critical_path=path,
                speedup_vs_1f1b=speedup if baseline else None,
                peak_live=peak,
                idle=dict(zip(causes, idle, strict=True)),
            )
        )
    return summaries


def _report(on_progress: Callable[[int, int], object], before: int, total: int, done: int) -> None:
    on_progress(before + done, total)


def _allowed(policy: Policy, pipeline: Pipeline) -> bool:
    """Whether a policy goes with the pipeline; interleaved 1F1B does not with every batch size."""
    try:
        policy.check(pipeline)
    except UsageError:
        return False
    return True
