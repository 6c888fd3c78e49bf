"""How long every task takes: means per stage, and one draw of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.jitter import Jitter, JitterConfig
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.simulate.jitter_law import Array, JitterLaw
from megatron_ext.simulate.network import Network, node_factors
from megatron_ext.simulate.pipeline import Pipeline, check_time

Rows = list["array[float]"]


@dataclass(frozen=True)
class MeanTimes:
    """Mean time of a task on every virtual stage, in the order in which the model runs."""

    forward: Sequence[float]
    backward: Sequence[float]
    """The whole backward, weight gradients included."""
    weight_share: float = 0.5
    """Part of a backward that is weight gradients, where a schedule splits them off."""

    @staticmethod
    def of(
        pipeline: Pipeline,
        forward: Sequence[float],
        backward: Sequence[float],
        weight_share: float = 0.5,
        layers: Sequence[int] = (),
    ) -> MeanTimes:
        """Spread what the user gave over the pipeline.

        Args:
            pipeline: Its shape.
            forward: One time for all stages, or one per stage or virtual stage.
            backward: Likewise.
            weight_share: As the field.
            layers: Of each virtual stage, or how many in all; times are then those of a stage
                with the mean number of layers.

        Raises:
            UsageError: A time is negative, or a count does not fit.
        """
        count = pipeline.virtual_stages
        if not 0 <= weight_share <= 1:
            raise UsageError(f"--weight-share {weight_share:g} is not between 0 and 1")
        split = np.array(spread_layers(layers, count), dtype=float)
        share = split / split.mean()
        spread = []
        for flag, given in (("--forward", forward), ("--backward", backward)):
            for value in given:
                check_time(flag, value)
            if len(given) not in (1, pipeline.stages, count):
                raise UsageError(
                    f"{flag}: {len(given)} times for {pipeline.stages} stages; give one, or one "
                    "per stage"
                )
            every = np.resize(np.array(given, dtype=float), count)
            spread.append([float(value) for value in every * share])
        return MeanTimes(spread[0], spread[1], weight_share)


def spread_layers(layers: Sequence[int], virtual_stages: int) -> list[int]:
    """Layers of every virtual stage, from one per stage or one number for all together.

    Raises:
        UsageError: There are fewer layers than chunks, or their count does not fit.
    """
    if not layers:
        return [1] * virtual_stages
    if len(layers) == 1:
        each, more = divmod(layers[0], virtual_stages)
        layers = [each + (stage < more) for stage in range(virtual_stages)]
    if len(layers) != virtual_stages:
        raise UsageError(
            f"--layers: {len(layers)} numbers for {virtual_stages} model chunks; give one per "
            "chunk (stages x chunks), or the sum"
        )
    if min(layers) < 1:
        raise UsageError(
            f"--layers: {sum(layers)} layers do not reach for {virtual_stages} model chunks "
            "(stages x chunks) of at least one each"
        )
    return list(layers)


@dataclass(frozen=True)
class TaskTimes:
    """One draw of all task times: arrays [virtual stage of a replica, microbatch].

    Row ``(replica * stages + stage) * chunks + chunk``; microbatches of all iterations.
    """

    forward: Array
    backward: Array
    """The whole backward."""
    weight: Array
    """The part of it that is weight gradients."""

    def work(self, chunks: int) -> Array:
        """All tasks' time of every stage of every replica."""
        rows = self.forward.sum(axis=1) + self.backward.sum(axis=1)
        return np.asarray(rows.reshape(-1, chunks).sum(axis=1))

    def rows(self, splits_weight: bool, weight_pieces: int = 1) -> tuple[Rows, Rows, Rows]:
        """The times of forwards, backwards and pieces of weight gradients, fast to look up."""
        backward = self.backward - self.weight if splits_weight else self.backward
        weight = self.weight / weight_pieces if splits_weight else self.weight[:, :0]
        return (as_rows(self.forward), as_rows(backward), as_rows(weight))


def draw_times(
    pipeline: Pipeline, means: MeanTimes, law: JitterLaw, network: Network, seed: int
) -> TaskTimes:
    """Draw every task's time; the same arguments give the same bytes."""
    generator = np.random.default_rng(seed)
    replicas, stages, chunks = pipeline.replicas, pipeline.stages, pipeline.chunks
    shape = (pipeline.pipeline_ranks * chunks, pipeline.microbatches)
    # Drawn by virtual stage and iteration, forwards first, as scripts/bench_schedules.py does.
    drawn: list[list[Array]] = [[], []]
    for _ in range(pipeline.iterations):
        for kind in (0, 1):
            factors = law.factors(generator, shape)
            for _ in range(pipeline.tensor_parallel - 1):
                np.maximum(factors, law.factors(generator, shape), out=factors)
            drawn[kind].append(factors)
    order = _storage_order(replicas, stages, chunks)
    slow = np.repeat(node_factors(pipeline, network, law, generator), chunks)
    lengths = [law.length_factors(generator, pipeline.all_microbatches) for _ in range(replicas)]
    length = np.repeat(np.array(lengths), stages * chunks, axis=0)
    forward, backward = (
        np.concatenate(parts, axis=1)[order]
        * np.tile(np.array(mean), replicas)[order][:, None]
        * length
        * slow[:, None]
        for parts, mean in zip(drawn, (means.forward, means.backward), strict=True)
    )
    times = TaskTimes(forward, backward, backward * means.weight_share)
    if law.delays is not None:
        _add_delays(times, pipeline, law.delays, seed)
    return times


def _storage_order(replicas: int, stages: int, chunks: int) -> NDArray[np.int_]:
    """Index of every storage row among rows by (replica, virtual stage)."""
    virtual = np.arange(replicas * chunks * stages).reshape(replicas, chunks, stages)
    return np.ascontiguousarray(virtual.transpose(0, 2, 1)).reshape(-1)


def _add_delays(times: TaskTimes, pipeline: Pipeline, config: JitterConfig, seed: int) -> None:
    """Delay tasks as --rrfp-jitter does, with its own draws; a unit of time is a millisecond."""
    chunks = pipeline.chunks
    forward, backward = times.forward, times.backward
    iteration = [seed]  # under way; its draws are those of a training's iteration of that number
    for rank in range(pipeline.pipeline_ranks):
        replica, stage = divmod(rank, pipeline.stages)
        delays = Jitter(
            config,
            stage=stage,
            replica=replica,
            iteration=lambda: iteration[0],
            stopwatch=_UNUSED,
        )
        for column in range(pipeline.all_microbatches):
            number, microbatch = divmod(column, pipeline.microbatches)
            iteration[0] = seed + number
            for chunk in range(chunks):
                row = rank * chunks + chunk
                for kind, table in ((Kind.FORWARD, forward), (Kind.BACKWARD, backward)):
                    task = Task(kind, microbatch, chunk)
                    delays.learn(task, float(table[row, column]) * 1e-3)
                    table[row, column] += delays.delay_s(task) * 1e3


class _NoStopwatch:
    """Tasks are not timed here: their times are given."""

    def start(self) -> None: ...
    def stop(self, started: object, report: object) -> None: ...
    def wait(self, seconds: float) -> None: ...


_UNUSED = _NoStopwatch()


def as_rows(table: Array) -> Rows:
    """The rows of a table, fast to look up one by one."""
    rows = []
    for row in table:
        values = array("d")
        values.frombytes(np.ascontiguousarray(row).tobytes())
        rows.append(values)
    return rows
