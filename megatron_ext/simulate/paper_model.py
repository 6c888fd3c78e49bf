"""A model of the machine in RRFP's evaluation, made from what the paper prints.

- Stages: the last one is slower. Its share as bottleneck and the 95th percentile of the other
  stages' times relative to it (section 6) give the ratios and the lognormal sigma below.
- Messages: Megatron's 1F1B waits for each of them, RRFP does not. How long one takes, in forwards
  of the last stage, is set so that 1F1B computes for 33.28% of an iteration in the setting of
  Table 3.
- The unit of time is set so that simulated 1F1B takes the seconds that the paper prints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from megatron_ext.simulate.jitter_law import JitterLaw
from megatron_ext.simulate.job import Draw, Job
from megatron_ext.simulate.network import Network
from megatron_ext.simulate.paper_settings import TABLE_3, TABLE_3_COMPUTE, Setting
from megatron_ext.simulate.pipeline import BASELINE, Pipeline, Policy
from megatron_ext.simulate.task_times import MeanTimes

# Time of a task relative to the last stage's, and sigma: text only, with a vision encoder.
_STAGE_RATIO = {False: 0.70, True: 0.80}
_SIGMA = {False: 0.08, True: 0.15}
_BISECTIONS = 12


@dataclass(frozen=True)
class Modelled:
    """A setting of the paper, on one draw; times are milliseconds."""

    setting: Setting
    hop: float
    """Time of a message, in forwards of the last stage; 0 for messages that cost nothing."""
    seed: int
    law: JitterLaw | None = None
    """Instead of the setting's own."""

    def seconds(self, policy: Policy, *, blocking: bool = False) -> float:
        """Time of an iteration, scaled so that 1F1B's is the paper's."""
        return self.setting.seconds_1f1b * self._units(policy, blocking) / self._reference()

    def speedup(self, policy: Policy) -> float:
        """Over 1F1B as the paper ran it, with messages that block."""
        return self._reference() / self._units(policy, blocking=False)

    @property
    def forward_ms(self) -> float:
        """Mean forward of the last stage."""
        return self.setting.seconds_1f1b * 1e3 / self._reference()

    def _reference(self) -> float:
        return self._units(BASELINE, blocking=True)

    def _units(self, policy: Policy, blocking: bool) -> float:
        job, draw = _drawn(self.setting, self.hop, self.seed, self.law)
        network = replace(job.network, blocking=blocking)
        return replace(job, network=network).run(draw, policy).makespan


@cache
def _drawn(
    setting: Setting, hop: float, seed: int, law: JitterLaw | None, unit: float = 1.0
) -> tuple[Job, Draw]:
    ratio = _STAGE_RATIO[setting.multimodal]
    pipeline = Pipeline(setting.stages, setting.microbatches, replicas=setting.replicas)
    profile = [ratio * unit] * (setting.stages - 1) + [unit]
    means = MeanTimes.of(pipeline, profile, [2 * time for time in profile])
    law = law or JitterLaw(sigma=_SIGMA[setting.multimodal])
    job = Job(pipeline, means, law, Network(latency=hop * unit))
    return job, job.draw(seed)


@cache
def hop_of_table_3(seed: int) -> float:
    """Time of a blocking message with which 1F1B computes as little as in Table 3."""
    low, high = 0.0, 8.0
    for _ in range(_BISECTIONS):
        hop = (low + high) / 2
        if compute_share(BASELINE, hop, seed, blocking=True) > TABLE_3_COMPUTE["1F1B"]:
            low = hop
        else:
            high = hop
    return (low + high) / 2


def compute_share(policy: Policy, hop: float, seed: int, *, blocking: bool) -> float:
    """Part of an iteration in which stages compute, in the setting of Table 3."""
    job, draw = _drawn(TABLE_3, hop, seed, None)
    network = replace(job.network, blocking=blocking)
    outcome = replace(job, network=network).run(draw, policy)
    return sum(outcome.busy) / len(outcome.busy) / outcome.makespan


def slowdown(
    setting: Setting, policy: Policy, law: JitterLaw, hop: float, seed: int, *, blocking: bool
) -> float:
    """How much longer an iteration takes with injected delays, which are in milliseconds."""
    unit = Modelled(setting, hop, seed).forward_ms
    makespans = []
    for one in (None, law):
        job, draw = _drawn(setting, hop, seed, one, unit)
        network = replace(job.network, blocking=blocking)
        makespans.append(replace(job, network=network).run(draw, policy).makespan)
    return makespans[1] / makespans[0] - 1
