"""Which flags to use: the fastest policy whose memory fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.hints import HINTS
from megatron_ext.pipeline.live_limit import parse_live_limit
from megatron_ext.simulate.job import Job, Memory, Summary, summarize
from megatron_ext.simulate.pipeline import BASELINE, Policy

LIMITS = ("0.5p", "0.75p", "p", "1.25p", "1.5p", "2p", "3p")
_WORTH_IT = 1.005
"""A policy that takes more memory must be at least this much faster."""


@dataclass(frozen=True)
class Candidate:
    """A policy, what it gives, and what it takes."""

    policy: Policy
    summary: Summary
    peak_gb: float

    @property
    def flags(self) -> str:
        """What to add to the training's command."""
        policy = self.policy
        if policy == BASELINE:
            return "--pipeline-schedule megatron"
        words = (
            f"--pipeline-schedule rrfp --rrfp-hint {policy.hint} "
            f"--rrfp-live-limit {policy.limit_text}"
        )
        return words + (" --pipedream-2bw" if policy.pipedream_2bw else "")


def candidates(stages: int, hints: list[str], limits: list[str], *, with_2bw: bool) -> list[Policy]:
    """All policies to try, each limit in its shortest form and once."""
    distinct: dict[int, str] = {}
    for limit in limits:
        distinct.setdefault(parse_live_limit(limit, stages), limit)
    found = [BASELINE]
    for continuous in (False, True) if with_2bw else (False,):
        for hint in hints:
            for limit in distinct.values():
                policy = Policy(hint, limit, continuous)
                # Training refuses 2BW in a fixed order.
                if policy != Policy("1f1b", "p") and not (continuous and HINTS[hint].fixed_order):
                    found.append(policy)
    return found


def measure(
    job: Job,
    policies: list[Policy],
    memory: Memory,
    seeds: range,
    on_progress: Callable[[int, int], object],
) -> list[Candidate]:
    """Simulate every policy that goes with the pipeline."""
    possible = []
    for policy in policies:
        try:
            policy.check(job.pipeline)
            policy.check_limit(job.pipeline)
        except UsageError:
            continue
        possible.append(policy)
    summaries = summarize(job, possible, seeds, on_progress=on_progress)
    chunks = job.pipeline.chunks
    return [
        Candidate(policy, summary, memory.peak_gb(summary.peak_live, chunks, policy))
        for policy, summary in zip(possible, summaries, strict=True)
    ]


def recommend(found: list[Candidate], memory_gb: float) -> Candidate:
    """The fastest that fits; of those about as fast, the one that takes least memory.

    Raises:
        UsageError: None fits.
    """
    fitting = [one for one in found if one.peak_gb <= memory_gb]
    if not fitting:
        least = min(found, key=lambda one: one.peak_gb)
        raise UsageError(
            f"--memory-gb {memory_gb:g}: nothing fits; {least.policy} takes least, "
            f"{least.peak_gb:.1f} GB"
        )
    fastest = min(one.summary.makespan for one in fitting)
    close = [one for one in fitting if one.summary.makespan <= fastest * _WORTH_IT]
    return min(close, key=lambda one: (one.peak_gb, one.summary.makespan))


def searched_hints() -> list[str]:
    """Hints of the runtime, the baseline's fixed order included."""
    return list(HINTS)


def searched_limits(stages: int, memory: Memory, memory_gb: float) -> list[str]:
    """The usual limits, and the largest that fits.

    Raises:
        UsageError: The memory of a live microbatch is not known, or not one fits.
    """
    if not memory.live_gb:
        raise UsageError("--recommend --memory-gb needs --live-gb, the memory of a live microbatch")
    if not 0 < memory_gb < math.inf:
        raise UsageError(f"--memory-gb {memory_gb:g}: it must be above 0")
    room = math.floor((memory_gb - memory.other_gb) / memory.live_gb + 1e-9)
    if room < 1:
        raise UsageError(
            f"--memory-gb {memory_gb:g}: --other-gb {memory.other_gb:g} leaves no room for a "
            f"microbatch of {memory.live_gb:g} GB"
        )
    return [limit for limit in LIMITS if parse_live_limit(limit, stages) <= room] + [str(room)]
