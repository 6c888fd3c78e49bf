"""Messages between stages: how long a hop takes, inside and between nodes.

Ranks are laid out as Megatron does it: tensor-parallel ranks are neighbours, then replicas, then
stages. So where a node holds the replicas of one stage, every hop of the pipeline leaves it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ext.errors import UsageError
from megatron_ext.simulate.jitter_law import Array, JitterLaw
from megatron_ext.simulate.pipeline import Pipeline, check_time


@dataclass(frozen=True)
class Network:
    """Time and room of a hop."""

    latency: float = 0.0
    """Time of a message between nodes."""
    latency_inside: float | None = None
    """Inside a node; as between nodes if None."""
    message_size: float = 0.0
    """Of an activation or gradient, in any unit."""
    bandwidth: float = math.inf
    """Size that a link between nodes carries in a unit of time, one message after the other."""
    bandwidth_inside: float | None = None
    """Inside a node; as between nodes if None."""
    ranks_per_node: int = 8
    blocking: bool = False
    """Whether a stage that sends does nothing else until the message has arrived."""

    def __post_init__(self) -> None:
        check_time("--hop-latency", self.latency)
        check_time("--hop-latency-inside", self.latency_inside or 0.0)
        if not 0 <= self.message_size < math.inf:
            raise UsageError(f"--message-size {self.message_size:g}: it is finite, not negative")
        for flag, bandwidth in (
            ("--bandwidth", self.bandwidth),
            ("--bandwidth-inside", self.bandwidth_inside),
        ):
            if bandwidth is not None and not bandwidth > 0:
                raise UsageError(f"{flag} {bandwidth:g}: it must be above 0")
        if self.ranks_per_node < 1:
            raise UsageError(f"--ranks-per-node {self.ranks_per_node}: it must be at least 1")

    def nodes(self, pipeline: Pipeline) -> list[list[int]]:
        """The nodes of every stage of every replica, [replica * stages + stage]."""
        tensor, replicas = pipeline.tensor_parallel, pipeline.replicas
        nodes = []
        for replica in range(replicas):
            for stage in range(pipeline.stages):
                first = tensor * (stage * replicas + replica)
                last = first + tensor - 1
                nodes.append(
                    list(range(first // self.ranks_per_node, last // self.ranks_per_node + 1))
                )
        return nodes

    def hops(
        self, pipeline: Pipeline, law: JitterLaw, generator: np.random.Generator
    ) -> list[tuple[Hop, Hop]]:
        """The hop to the next stage and that to the one before, of every stage; ends meet."""
        nodes = self.nodes(pipeline)
        slow = law.slow_links.draw(generator, 2 * len(nodes)).reshape(-1, 2)
        stages = pipeline.stages
        hops = []
        for rank, mine in enumerate(nodes):
            replica, stage = divmod(rank, stages)
            pair = []
            for direction, step in enumerate((1, -1)):
                other = nodes[replica * stages + (stage + step) % stages]
                pair.append(self._hop(mine == other, float(slow[rank, direction])))
            hops.append((pair[0], pair[1]))
        return hops

    def _hop(self, inside: bool, factor: float) -> Hop:
        latency, bandwidth = self.latency, self.bandwidth
        if inside and self.latency_inside is not None:
            latency = self.latency_inside
        if inside and self.bandwidth_inside is not None:
            bandwidth = self.bandwidth_inside
        return Hop(latency * factor, self.message_size / bandwidth * factor)


@dataclass(frozen=True, slots=True)
class Hop:
    """A link from a stage to a neighbour."""

    latency: float
    """From the last byte sent to its arrival."""
    transfer: float
    """For which a message keeps the link to itself."""


def node_factors(
    pipeline: Pipeline, network: Network, law: JitterLaw, generator: np.random.Generator
) -> Array:
    """How much slower the nodes of every stage are, [replica * stages + stage]."""
    nodes = network.nodes(pipeline)
    slow = law.slow_nodes.draw(generator, max(max(mine) for mine in nodes) + 1)
    return np.array([max(slow[node] for node in mine) for mine in nodes])
