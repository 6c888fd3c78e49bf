"""Simulate a traced run again, and then under other policies, splits and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.hints import HINTS
from megatron_ext.simulate.jitter_law import Array
from megatron_ext.simulate.job import Job
from megatron_ext.simulate.network import Network
from megatron_ext.simulate.pipeline import Clipping, Pipeline, Policy
from megatron_ext.simulate.task_times import TaskTimes
from megatron_ext.simulate.traced_run import TracedBatch, TracedRun

_FEWEST_ITERATIONS = 4  # so that what happens between batches counts


@dataclass(frozen=True)
class Replay:
    """A traced run with what the trace does not tell."""

    run: TracedRun
    pipeline: Pipeline
    """One batch of it, with all times besides tasks."""
    network: Network
    weight_share: float
    """For schedules that split, where the run did not."""

    def job(self, batch: TracedBatch) -> Job:
        """One batch as it was."""
        return Job(
            self.pipeline,
            network=self.network,
            given=self._times(batch),
            given_factors=self._factors([batch.hops]),
        )

    def predict(self, policy: Policy) -> list[float]:
        """Makespans of the traced batches."""
        if policy.pipedream_2bw:
            return self._predict_continuous(policy)
        makespans = []
        for batch in self.run.batches:
            job = self.job(batch)
            makespans.append(job.run(job.draw(0), policy).makespan)
        return makespans

    def _predict_continuous(self, policy: Policy) -> list[float]:
        """From end to end of batches that overlap.

        Where the trace shows the middle of a run, the first and the last batch are run once more,
        before and after all, so that each batch has neighbours as it had in the run.
        """
        run = self.run
        before, after = run.batches[: not run.begins], run.batches[len(run.batches) - 1 :]
        around = [*before, *run.batches, *(() if run.drains else after)]
        job = self._job_of(around, run.microbatches)
        ended = [0.0, *job.run(job.draw(0), policy).batch_ended]
        ended = ended[len(before) : len(before) + len(run.batches) + 1]
        return [end - start for start, end in pairwise(ended)]

    def known_policy(self) -> Policy | None:
        """The policy that the trace's settings name; None where they name none known here."""
        settings = self.run.settings
        hint, limit = str(settings.get("hint")), settings.get("live limit")
        if limit is None or hint not in HINTS:
            return None
        pieces = HINTS[hint].weight_pieces if HINTS[hint].splits_weight else 0
        if pieces != self.run.weight_pieces:
            return None  # of layers that cannot be split
        # As users write it, where it is the same; some hints have a limit for every stage.
        first = str(limit).split(",")[0]
        limits = [int(text) for text in str(limit).split(",")]
        for text in ("p", "1.5p", "2p", first):
            same = Policy(hint, text).limits(self.run.stages, self.run.chunks)
            if same == (limits if len(limits) > 1 else limits * self.run.stages):
                limit = text
                break
        limit = None if limit == HINTS[hint].live_limit else str(limit)
        try:
            clipping = Clipping(settings.get("2BW clip", Clipping.EXACT))
        except ValueError:
            return None
        policy = Policy(hint, limit, self.run.continuous, clipping)
        try:
            policy.check(self.pipeline)
        except UsageError:
            return None
        return policy

    def likely_policy(self) -> Policy:
        """The hint and limit that reproduce the order of the first batch best.

        Raises:
            UsageError: Batches overlap, so that no order is that of one batch.
        """
        if self.run.continuous:
            raise UsageError(
                "the traces do not name a hint that is known here, and in a run with two weight "
                "versions it cannot be found out: give --traced-hint and --traced-limit"
            )
        batch = self.run.batches[0]
        job = self.job(batch)
        draw = job.draw(0)
        peak = -(-self.run.peak_live // self.run.chunks)
        best, best_score = Policy("1f1b"), -1.0
        for hint, known in HINTS.items():
            pieces = known.weight_pieces if known.splits_weight else 0
            if pieces != self.run.weight_pieces:
                continue
            for limit in dict.fromkeys((str(peak), "p", "1.5p", "2p")):
                policy = Policy(hint, limit)
                try:
                    outcome = job.run(draw, policy, record=True)
                except UsageError:
                    continue
                assert outcome.recordings is not None
                score = 0.0
                for recording, order in zip(outcome.recordings, batch.orders, strict=True):
                    simulated = [ran.task for ran in recording.tasks]
                    score += sum(a == b for a, b in zip(simulated, order, strict=True))
                if score > best_score:
                    best, best_score = policy, score
        return best

    def what_if(
        self,
        *,
        microbatches: int | None = None,
        layers: Sequence[int] = (),
        split: Sequence[int] = (),
        seed: int = 0,
    ) -> Job:
        """The traced batches one after the other, changed.

        Args:
            microbatches: Another number per batch: measured ones are drawn with replacement.
            layers: Of each virtual stage in the traced run.
            split: What they should be instead; times change in proportion.
            seed: Of that draw.

        Raises:
            UsageError: The numbers of layers do not go together.
        """
        batches = self.run.batches
        count = max(_FEWEST_ITERATIONS, len(batches))
        chosen = [batches[number % len(batches)] for number in range(count)]
        size = microbatches or self.run.microbatches
        return self._job_of(chosen, size, self._layer_scale(layers, split), seed)

    def _job_of(
        self,
        batches: Sequence[TracedBatch],
        size: int,
        scale: Array | float = 1.0,
        seed: int = 0,
    ) -> Job:
        """Traced batches one after the other, with that many microbatches each."""
        chosen = [self._times(batch) for batch in batches]
        measured = [batch.hops for batch in batches]
        generator = np.random.default_rng(seed)
        columns = [
            generator.integers(0, self.run.microbatches, size)
            if size != self.run.microbatches
            else np.arange(size)
            for _ in chosen
        ]

        def joined(name: str) -> Array:
            parts = [
                getattr(batch, name)[:, column]
                for batch, column in zip(chosen, columns, strict=True)
            ]
            return np.concatenate(parts, axis=1) * scale

        times = TaskTimes(joined("forward"), joined("backward"), joined("weight"))
        pipeline = replace(self.pipeline, iterations=len(chosen), microbatches=size)
        hops = [
            (messages[0][:, column], messages[1][:, column])
            for messages, column in zip(measured, columns, strict=True)
        ]
        return Job(pipeline, network=self.network, given=times, given_factors=self._factors(hops))

    def _times(self, batch: TracedBatch) -> TaskTimes:
        times = batch.times
        if self.run.splits_weight:
            return times
        return TaskTimes(times.forward, times.backward, times.backward * self.weight_share)

    def _factors(self, hops: list[tuple[Array, Array]]) -> tuple[Array, Array] | None:
        """Measured latencies relative to their median, so that another one scales them all."""
        median = self.run.hop_latency
        if not median:
            return None
        return (
            np.concatenate([one for one, _ in hops], axis=1) / median,
            np.concatenate([two for _, two in hops], axis=1) / median,
        )

    def _layer_scale(self, layers: Sequence[int], split: Sequence[int]) -> Array:
        """How much longer every row's tasks become, [row, 1]."""
        stages, chunks = self.run.stages, self.run.chunks
        virtual = stages * chunks
        if not split:
            return np.ones((1, 1))
        now = list(layers) if len(layers) > 1 else [sum(split) // virtual] * virtual
        if layers and len(layers) == 1:
            now = [layers[0] // virtual] * virtual
        if len(split) != virtual or len(now) != virtual:
            raise UsageError(
                f"--split: it takes one number of layers for each of {virtual} model chunks, and "
                "so does --layers"
            )
        if min(split) < 1:
            raise UsageError("--split: every model chunk needs at least one layer")
        if sum(now) != sum(split):
            raise UsageError(
                f"--split has {sum(split)} layers and the traced run {sum(now)}; give its split "
                "with --layers"
            )
        ratio = np.array(split, dtype=float) / np.array(now, dtype=float)
        rows = [ratio[chunk * stages + stage] for stage in range(stages) for chunk in range(chunks)]
        return np.tile(np.array(rows), self.run.replicas)[:, None]
