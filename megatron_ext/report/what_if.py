"""What other settings would give, from a run's own traces; bounded in time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.hints import HINTS
from megatron_ext.simulate.job import Memory
from megatron_ext.simulate.network import Network
from megatron_ext.simulate.pipeline import BASELINE, Pipeline
from megatron_ext.simulate.rank_trace import RankTrace
from megatron_ext.simulate.recommend import Candidate, candidates, measure
from megatron_ext.simulate.replay import Replay
from megatron_ext.simulate.traced_run import TracedRun, traced_run

_TASK_S = 8e-6
"""What a simulated task costs, about."""
_BUDGET_S = 12.0
_HINTS = ("bfw-pieces", "bfw-depth", "bfw", "bf")
_LIMITS = ["p", "1.5p", "2p"]
_WEIGHT_SHARE = 0.5


@dataclass
class WhatIf:
    """Other settings, the fastest first; or why there are none."""

    skipped: str = ""
    ran: str = ""
    """The policy of the run."""
    measured: float = 0.0
    """Mean time of a traced iteration."""
    error: float = 0.0
    """Median of how far the simulation of the run itself is off."""
    iterations: int = 0
    """So many traced ones were used."""
    found: list[Candidate] = field(default_factory=list)
    per_run: int = 1
    """Iterations of every simulation."""


def simulate_others(ranks: Sequence[RankTrace]) -> WhatIf:
    """Predict the traced run, then what other hints, limits and 2BW would give."""
    try:
        return _simulate(traced_run({rank.rank: rank for rank in ranks}, "the traces"))
    except UsageError as error:
        return WhatIf(skipped=str(error))


def _simulate(run: TracedRun) -> WhatIf:
    hints = [hint for hint in _HINTS if run.splits_weight or not HINTS[hint].splits_weight]
    policies = candidates(run.stages, hints, _LIMITS, with_2bw=True)
    kinds = 3 if run.splits_weight else 2
    tasks = run.stages * run.replicas * run.chunks * run.microbatches * kinds
    # At least four iterations go into every simulation.
    most = int(_BUDGET_S / (_TASK_S * tasks * (len(policies) + 2)))
    if most < 4:
        return WhatIf(
            skipped=f"an iteration has {tasks:,} tasks, too many to try {len(policies)} settings "
            "while you wait; type: megatron-ext simulate --from-trace DIR"
        )
    run = replace(run, batches=run.batches[:most])
    pipeline = Pipeline(
        stages=run.stages,
        microbatches=run.microbatches,
        chunks=run.chunks,
        replicas=run.replicas,
        iterations=1,
        task_overhead=run.task_overhead,
        update=run.update,
        norm_latency=run.norm_latency,
        reduction=run.reduction,
    )
    replay = Replay(run, pipeline, Network(latency=run.hop_latency), _WEIGHT_SHARE)
    ran = replay.known_policy() or replay.likely_policy()
    measured = [batch.makespan for batch in run.batches]
    predicted = replay.predict(ran)
    errors = [abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)]
    job = replay.what_if()
    policies = list(dict.fromkeys([ran, BASELINE, *policies]))
    found = measure(job, policies, Memory(), range(1), lambda done, total: None)
    found.sort(key=lambda one: one.summary.makespan)
    return WhatIf(
        ran=str(ran),
        measured=statistics.fmean(measured),
        error=statistics.median(errors),
        iterations=len(measured),
        found=found,
        per_run=job.pipeline.iterations,
    )
