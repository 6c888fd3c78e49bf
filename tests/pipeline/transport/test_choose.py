"""Which transport `--rrfp-transport` means, and what is said if it cannot be had."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from megatron_ext import arguments
from megatron_ext.errors import UsageError
from megatron_ext.pipeline.transport import choose
from megatron_ext.pipeline.transport.nixl_agent import Agent
from tests.ranks import run_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "device", "nixl_installed", "expected"),
    [
        ("auto", CPU, True, "gloo"),
        ("auto", GPU, True, "nixl"),
        ("auto", GPU, False, "nccl"),
        ("gloo", GPU, True, "gloo"),
        ("nixl", CPU, True, "nixl"),
        ("nccl", GPU, True, "nccl"),
    ],
)
def test_resolve(
    name: str,
    device: torch.device,
    nixl_installed: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if nixl_installed else None)
    assert choose.resolve(name, device) == expected


def test_nccl_needs_a_gpu() -> None:
    with pytest.raises(UsageError, match="--rrfp-transport nccl needs a GPU"):
        choose.resolve("nccl", CPU)


def test_without_nixl_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(UsageError) as caught:
        Agent("name", [])
    (line,) = str(caught.value).splitlines()
    assert "--rrfp-transport nixl" in line
    assert "pip install nixl" in line


def test_the_flag_offers_every_transport() -> None:
    parser = arguments.add_arguments(__import__("argparse").ArgumentParser())
    (action,) = (a for a in parser._actions if a.dest == "rrfp_transport")
    assert tuple(action.choices or ()) == choose.TRANSPORTS


@pytest.mark.multiprocess
def test_stages_that_choose_differently_are_told() -> None:
    for rank in run_ranks(2, _choose_differently, timeout_s=30):
        assert rank.exit_code == 0, rank.output


def _choose_differently(rank: int) -> None:
    import torch.distributed as dist

    from megatron_ext.pipeline.task import Direction

    dist.init_process_group("gloo", rank=rank, world_size=2)
    resolve: dict[int, Any] = {0: lambda *_: "gloo", 1: lambda *_: "nixl"}
    choose.resolve = resolve[rank]
    with pytest.raises(UsageError, match="gloo on stages \\[0\\], nixl on stages \\[1\\]"):
        choose.open_links(
            "auto",
            [0, 1],
            sources={Direction.BACKWARD: 1} if rank == 0 else {Direction.FORWARD: 0},
            destinations={Direction.FORWARD: 1} if rank == 0 else {Direction.BACKWARD: 0},
            capacity=2,
            device=CPU,
            timeout_s=20,
        )
