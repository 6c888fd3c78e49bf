"""Where the result of a task goes."""

from __future__ import annotations

from megatron_ext.simulate.network import Hop
from megatron_ext.simulate.pipeline import Pipeline

Route = tuple[int, int, float, float, int]
"""Rank and chunk that need the result, latency and transfer time of the hop, number of the link."""


def make_routes(
    pipeline: Pipeline, hops: list[tuple[Hop, Hop]]
) -> tuple[list[Route | None], list[Route | None]]:
    """Routes of forwards and of backwards, [rank * chunks + chunk]; None where the model ends."""
    stages, chunks = pipeline.stages, pipeline.chunks
    routes: tuple[list[Route | None], list[Route | None]] = ([], [])
    for rank, pair in enumerate(hops):
        replica, stage = divmod(rank, stages)
        for chunk in range(chunks):
            for direction, step in enumerate((1, -1)):
                virtual = chunk * stages + stage + step
                if not 0 <= virtual < pipeline.virtual_stages:
                    routes[direction].append(None)
                    continue
                chunk_there, stage_there = divmod(virtual, stages)
                hop = pair[direction]
                routes[direction].append(
                    (
                        replica * stages + stage_there,
                        chunk_there,
                        hop.latency,
                        hop.transfer,
                        2 * rank + direction,
                    )
                )
    return routes
