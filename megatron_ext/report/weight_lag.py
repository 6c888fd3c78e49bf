"""How old the weights were, and how updates lay between the tasks (two weight versions)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.simulate.rank_trace import RankTrace


@dataclass(frozen=True)
class BatchLag:
    """Of one batch, over all stages."""

    iteration: int
    lag: int
    """Updates between the weights that the batch computed with and the newest ones."""
    update_after: float | None
    """Longest time, in milliseconds, from a stage's last task of the batch to the end of its
    update there; None where the update ran outside the trace."""
    ran_meanwhile: int
    """Tasks of the next batch that ran before the update was done, over all stages."""
    tasks: int
    """Tasks of a batch over all stages."""


def batch_lags(ranks: Sequence[RankTrace]) -> list[BatchLag]:
    """The batches that all ranks traced."""
    if not ranks:
        return []
    shared = set.intersection(*(set(rank.batches) for rank in ranks))
    found = []
    for iteration in sorted(shared):
        lag = ran = own = 0
        after: float | None = None
        for rank in ranks:
            details = rank.details[iteration]
            lag = max(lag, int(details.get("weight lag", 0)))
            first, size = rank.first_microbatch(iteration), int(details.get("microbatches", 0))
            mine = [one for one in rank.tasks[iteration] if one.task.microbatch < first + size]
            own += len(mine)
            ran += len(rank.tasks[iteration]) - len(mine)
            if iteration in rank.continuous and mine:
                after = max(after or 0.0, rank.batches[iteration][1] - mine[-1].ended)
        found.append(BatchLag(iteration, lag, after, ran, own + ran))
    return found
