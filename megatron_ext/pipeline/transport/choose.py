"""Which transport a run uses, and how a stage opens its links with it."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import PipelineError, UsageError
from megatron_ext.pipeline.task import Direction
from megatron_ext.pipeline.transport.base import Transport
from megatron_ext.pipeline.transport.gloo import GlooTransport, make_group
from megatron_ext.pipeline.transport.nccl import NcclTransport, open_channels
from megatron_ext.pipeline.transport.nixl import NixlTransport

TRANSPORTS = ("auto", "gloo", "nixl", "nccl")


def open_links(
    name: str,
    ranks: list[int],
    *,
    sources: dict[Direction, int],
    destinations: dict[Direction, int],
    capacity: int,
    device: torch.device,
    timeout_s: float,
) -> Transport:
    """Open the links of one stage; all stages of a pipeline call this at about the same time.

    Args:
        name: One of `TRANSPORTS`.
        ranks: Global ranks of the pipeline's stages, in order.
        sources: Stage to receive from, per direction.
        destinations: Stage to send to, per direction.
        capacity: Receive buffers per direction.
        device: Where the model is.
        timeout_s: Seconds after which a silent neighbour counts as lost.

    Raises:
        UsageError: The transport does not go with the device or with what is installed.
        PipelineError: A neighbour cannot be reached.
    """
    # The executor watches the time and knows what it waits for; gloo only backs it up.
    group = make_group(ranks, 2 * timeout_s + 10)
    chosen = _agreed(group, resolve(name, device))
    ends: dict[str, Any] = {"sources": sources, "destinations": destinations}
    rest: dict[str, Any] = {"capacity": capacity, "device": device}
    if chosen == "gloo":
        return GlooTransport(group, **ends, **rest)
    try:
        if chosen == "nixl":
            return NixlTransport(group, **ends, **rest, timeout_s=timeout_s)
        channels = open_channels(group, **ends, device=device, timeout_s=timeout_s)
        return NcclTransport(group, channels, **ends, **rest, timeout_s=timeout_s)
    except OSError as error:
        raise PipelineError(f"--rrfp-transport {chosen}: {error}") from error


def resolve(name: str, device: torch.device) -> str:
    """The transport that `name` means for a model on `device`.

    Raises:
        UsageError: That transport cannot serve this device.
    """
    on_gpu = device.type == "cuda"
    if name == "auto":
        if not on_gpu:
            return "gloo"
        return "nixl" if importlib.util.find_spec("nixl") else "nccl"
    check_transport(name, on_gpu)
    return name


def check_transport(name: str, on_gpu: bool) -> None:
    """Refuse at the start what no stage could open.

    Raises:
        UsageError: That transport cannot serve this device, or is not installed.
    """
    if name == "nccl" and not on_gpu:
        raise UsageError("--rrfp-transport nccl needs a GPU; on CPU use gloo or nixl")
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        raise UsageError(
            "--rrfp-transport nixl needs NIXL, which is not installed: pip install nixl, or leave "
            "the flag out"
        )


def _agreed(group: dist.ProcessGroup, chosen: str) -> str:
    """`chosen`, if all stages have chosen the same."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, chosen, group=group)
    if set(everyone) == {chosen}:
        return chosen
    stages = {name: [s for s, other in enumerate(everyone) if other == name] for name in everyone}
    choices = ", ".join(f"{name} on stages {numbers}" for name, numbers in stages.items())
    raise UsageError(
        f"--rrfp-transport auto finds different transports ({choices}); "
        "install nixl on all hosts or on none, or name a transport"
    )
