"""What is simulated: the pipeline's shape, and the policy under which it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.hints import Hint, Place
from megatron_ext.pipeline.live_limit import parse_live_limit, tapered
from megatron_ext.simulate.schedules import AllForwardsFirst, find_schedule, least_limit


class Clipping(StrEnum):
    """What an optimizer step waits for before it may scale gradients."""

    EXACT = "exact"
    """The norm over all stages."""
    STAGE = "stage"
    """The norm over the stage itself."""
    OFF = "off"


@dataclass(frozen=True)
class Pipeline:
    """Shape of a job, and what it does besides tasks and messages."""

    stages: int
    microbatches: int
    chunks: int = 1
    """Model chunks (virtual stages) per stage."""
    iterations: int = 1
    tensor_parallel: int = 1
    """Ranks that share every task; it takes as long as on the slowest of them."""
    replicas: int = 1
    """Data-parallel copies of the pipeline; they meet in the reduction of gradients."""
    update: float = 0.0
    """Time of an optimizer step on a stage."""
    reduction: float = 0.0
    """Time from a stage's last gradient on the last replica to the sum on all of them."""
    norm_latency: float = 0.0
    """Time to sum the gradient norm over all stages."""
    task_overhead: float = 0.0
    """Time that a stage spends on every task besides computing: a decision, Python, queues."""
    agreement: float = 0.0
    """Time of every decision that ranks of a tensor-parallel group make together."""

    def __post_init__(self) -> None:
        for flag, count in (
            ("--stages", self.stages),
            ("--microbatches", self.microbatches),
            ("--chunks", self.chunks),
            ("--iterations", self.iterations),
            ("--tensor-parallel", self.tensor_parallel),
            ("--replicas", self.replicas),
        ):
            if count < 1:
                raise UsageError(f"{flag} {count}: it must be at least 1")
        if self.chunks > 1 and self.stages < 2:
            raise UsageError(f"--chunks {self.chunks} needs at least 2 stages, not {self.stages}")
        for flag, seconds in (
            ("--update", self.update),
            ("--reduction", self.reduction),
            ("--norm-latency", self.norm_latency),
            ("--task-overhead", self.task_overhead),
            ("--agreement", self.agreement),
        ):
            check_time(flag, seconds)

    @property
    def virtual_stages(self) -> int:
        """Model chunks of one replica."""
        return self.stages * self.chunks

    @property
    def pipeline_ranks(self) -> int:
        """Stages of all replicas; the ranks of a tensor-parallel group count once."""
        return self.stages * self.replicas

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return self.pipeline_ranks * self.tensor_parallel

    @property
    def all_microbatches(self) -> int:
        """Microbatches of a replica over all iterations."""
        return self.microbatches * self.iterations

    @property
    def decision(self) -> float:
        """Time before every task in which nothing is computed."""
        return self.task_overhead + (self.agreement if self.tensor_parallel > 1 else 0.0)


@dataclass(frozen=True)
class Policy:
    """A schedule: a hint, its limit, and what happens between batches."""

    hint: str = "bfw-pieces"
    """A name of `schedules.SCHEDULES`, or ``module:Name``."""
    live_limit: str | None = None
    """Such as ``12`` or ``1.5p``, or one per stage, ``4,3,2``; the hint's own if None."""
    pipedream_2bw: bool = False
    """Two-buffered weights: the pipeline goes on with the next batch while one ends."""
    clipping: Clipping = Clipping.EXACT

    @property
    def hint_class(self) -> type[Hint]:
        """The hint.

        Raises:
            UsageError: There is none of that name.
        """
        try:
            return find_schedule(self.hint)
        except ValueError as error:
            raise UsageError(f"--hint: {error}") from None

    @property
    def limit_text(self) -> str:
        """The limit, as the user wrote it or the hint sets it."""
        return self.live_limit or self.hint_class.live_limit

    def limits(self, stages: int, chunks: int = 1) -> list[int]:
        """The limit of every stage, in microbatches.

        Raises:
            UsageError: One is no limit, or there is another number of them.
        """
        try:
            limits = [parse_live_limit(text, stages) for text in self.limit_text.split(",")]
        except ValueError as error:
            raise UsageError(f"--live-limit {self.limit_text}: {error}") from None
        if len(limits) not in (1, stages):
            raise UsageError(
                f"--live-limit {self.limit_text}: {len(limits)} limits for {stages} stages; give "
                "one, or one per stage"
            )
        if len(limits) > 1:
            return limits
        if self.hint_class.tapers and chunks == 1:
            return [tapered(limits[0], stage, stages) for stage in range(stages)]
        return limits * stages

    def check(self, pipeline: Pipeline) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: The hint refuses the pipeline.
        """
        limits = self.limits(pipeline.stages, pipeline.chunks)
        place = Place(0, pipeline.stages, pipeline.microbatches, limits[0], pipeline.chunks)
        try:
            self.hint_class(place)
        except ValueError as error:
            raise UsageError(f"--hint {self.hint}: {error}") from None
        if self.pipedream_2bw and self.hint_class.fixed_order:
            least = self._least(pipeline)
            if least > pipeline.microbatches or self.hint_class is AllForwardsFirst:
                raise UsageError(
                    f"--pipedream-2bw does not go with --hint {self.hint} and "
                    f"{pipeline.microbatches} microbatches: its order works further ahead than "
                    "two weight versions let it"
                )

    def _least(self, pipeline: Pipeline) -> int:
        """Microbatches in flight without which a fixed order stalls."""
        limits = self.limits(pipeline.stages)
        shape = pipeline.stages, pipeline.all_microbatches, pipeline.chunks
        return max(least_limit(self.hint_class, *shape), limits[0] if pipeline.chunks == 1 else 1)

    def check_limit(self, pipeline: Pipeline) -> None:
        """Refuse a limit that a schedule would not keep.

        Raises:
            UsageError: The order is fixed and holds more.
        """
        least = least_limit(
            self.hint_class, pipeline.stages, pipeline.microbatches, pipeline.chunks
        )
        if self.live_limit is not None and max(self.limits(pipeline.stages)) < least:
            raise UsageError(
                f"--live-limit {self.live_limit}: {self.hint} holds {least} microbatches here, "
                f"whatever the limit; give at least {least}, or leave it out"
            )

    def __str__(self) -> str:
        words = [self.hint, self.limit_text]
        if self.pipedream_2bw:
            words.append("2BW")
            if self.clipping is not Clipping.EXACT:
                words.append(f"clipping {self.clipping}")
        return " ".join(words)


BASELINE = Policy("1f1b")
"""What speedups are measured against: Megatron's order and memory, a flush after every batch."""


def check_time(flag: str, value: float) -> None:
    """Refuse a time that is negative, infinite or not a number.

    Raises:
        UsageError: It is.
    """
    if not 0 <= value < math.inf:
        raise UsageError(f"{flag} {value:g}: a time is finite and not negative")
