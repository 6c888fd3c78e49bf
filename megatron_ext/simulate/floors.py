"""Times that no schedule beats, whatever its order and memory."""

from __future__ import annotations

from megatron_ext.simulate.network import Hop
from megatron_ext.simulate.pipeline import Pipeline
from megatron_ext.simulate.task_times import TaskTimes


def busiest_stage(pipeline: Pipeline, times: TaskTimes) -> float:
    """The work of the busiest stage over all iterations."""
    return float(times.work(pipeline.chunks).max())


def critical_path(pipeline: Pipeline, times: TaskTimes, hops: list[tuple[Hop, Hop]]) -> float:
    """The longest chain of tasks and messages that must follow one another.

    Two kinds of chain: one microbatch through the whole model and back; and all work of a stage,
    after its first input came through the stages before and before its last gradient went back
    through them. In the second, weight gradients may run while the last gradient travels. Chains
    that depend on a schedule, such as those through a flush, are not counted.
    """
    stages, chunks = pipeline.stages, pipeline.chunks
    longest = 0.0
    for replica in range(pipeline.replicas):
        ranks = range(replica * stages, (replica + 1) * stages)
        model = [rank * chunks + chunk for chunk in range(chunks) for rank in ranks]
        there = [sum(_parts(hops[row // chunks][0])) for row in model]
        back = [sum(_parts(hops[row // chunks][1])) for row in model]
        travel = sum(there[:-1]) + sum(back[1:])
        inputs = times.backward[model] - times.weight[model]  # the shortest that backwards can be
        through = times.forward[model].sum(axis=0) + inputs.sum(axis=0)
        longest = max(longest, float(through.max()) + travel)
        # On chunk 0 of each stage the first microbatch enters and the last one leaves.
        enters = leaves = 0.0
        for position, rank in enumerate(ranks):
            mine = slice(rank * chunks, (rank + 1) * chunks)
            work = float(times.forward[mine].sum() + times.backward[mine].sum())
            weight = float(times.weight[mine].sum())
            longest = max(longest, enters + work, enters + work - weight + leaves)
            enters += float(times.forward[rank * chunks, 0]) + there[position]
            leaves += float(inputs[position, -1])
            if position + 1 < stages:
                leaves += back[position + 1]
    return longest


def _parts(hop: Hop) -> tuple[float, float]:
    return hop.latency, hop.transfer
