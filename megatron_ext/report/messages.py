"""How long messages took, and how long they lay before they were used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ext.collapse.arrays import Floats
from megatron_ext.pipeline.task import Direction, Kind
from megatron_ext.simulate.rank_trace import RankTrace


@dataclass
class MessageTimes:
    """Of one direction, in milliseconds."""

    latency: list[float] = field(default_factory=list)
    """From the end of the task that sent a message to its arrival."""
    age: list[float] = field(default_factory=list)
    """From there to the start of the task that used it."""


def message_times(ranks: Sequence[RankTrace]) -> dict[Direction, MessageTimes]:
    """The messages between ranks whose traces are there."""
    times = {direction: MessageTimes() for direction in Direction}
    arrived = {flow: at for rank in ranks for flow, at in rank.arrived.items()}
    used = {flow: at for rank in ranks for flow, at in rank.used.items()}
    for rank in ranks:
        for flow, sender in rank.sent.items():
            if flow not in arrived or sender.task.kind is Kind.WEIGHT:
                continue
            found = times[Direction(sender.task.kind)]
            found.latency.append(max(arrived[flow] - sender.ended, 0.0))
            if flow in used:
                found.age.append(max(used[flow] - arrived[flow], 0.0))
    return times


def quantiles(values: Sequence[float], levels: Sequence[float]) -> list[float | None]:
    """Quantiles of some values; None where there are no values."""
    if not values:
        return [None] * len(levels)
    array: Floats = np.asarray(values, dtype=np.float64)
    return [float(value) for value in np.quantile(array, levels)]
