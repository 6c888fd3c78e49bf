"""What ``--cpu`` changes in PyTorch, and that it changes nothing when it is not given."""

from __future__ import annotations

import argparse
import datetime
import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_ext import cpu
from tests.ranks import check_ranks, run_ranks


def test_nothing_changes_by_importing() -> None:
    code = (
        "import torch, megatron_ext.cpu, megatron_ext.hooks, megatron_ext.arguments\n"
        "assert torch.cuda.device_count.__module__ == 'torch.cuda'\n"
        "assert torch.empty.__class__.__name__ == 'builtin_function_or_method'\n"
        "assert not megatron_ext.cpu.enabled()\n"
        "assert 'megatron' not in {name.split('.')[0] for name in __import__('sys').modules}\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_cuda_requests_are_answered_on_the_cpu() -> None:
    check_ranks(run_ranks(1, _use_cuda_names))


def _use_cuda_names(_: int) -> None:
    assert cpu.enabled()
    cpu.enable()  # again: no second layer of wrappers
    assert not hasattr(torch.empty.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]
    devices = ["cuda", "cuda:0", torch.device("cuda", 3), torch.cuda.current_device(), "cpu", None]
    for device in devices:
        for make in (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn):
            assert make(2, device=device).device.type == "cpu"
        assert torch.tensor([1.0], device=device).device.type == "cpu"
        assert torch.arange(3, device=device).device.type == "cpu"
        assert torch.ones(2).new_empty(3, device=device).device.type == "cpu"
        assert torch.nn.Linear(2, 2, device=device).weight.device.type == "cpu"
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.to("cuda") is tensor
    assert tensor.to("cuda", torch.float64).dtype is torch.float64
    assert tensor.to(torch.bfloat16).dtype is torch.bfloat16
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type(torch.float64).dtype is torch.float64
    assert torch.nn.Linear(2, 2).cuda().to("cuda:0").weight.device.type == "cpu"
    assert not torch.cuda.is_available()

    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed(5)
    again = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), again)

    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
    assert 0 <= start.elapsed_time(end) < 1000
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert torch.compile(torch.sin) is torch.sin
    assert torch.compile(dynamic=True)(torch.sin) is torch.sin
    # Dynamo lists PyTorch's functions, and must not trip over ours.
    importlib.import_module("torch._dynamo")


def test_arguments_that_need_a_gpu_are_turned_off() -> None:
    args = argparse.Namespace(
        distributed_backend="nccl", transformer_impl="transformer_engine", num_workers=0
    )
    changes = cpu.adjust_arguments(args)
    assert vars(args) == {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "num_workers": 0,
    }
    assert changes == ["--distributed-backend gloo", "--transformer-impl local"]


# What Megatron itself trains on the CPU, with its own schedules.
TRAINED = [
    (2, "--tensor-model-parallel-size 2"),
    (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --optimizer muon"),
    (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    (2, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    (1, "--optimizer muon --bf16"),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("processes", "flags"), TRAINED)
def test_megatron_trains(corpus, processes: int, flags: str) -> None:  # type: ignore[no-untyped-def]
    from tests.training import train_well

    records = train_well(corpus, processes, flags)
    losses = [step[0]["lm loss"] for step in records[-1]["steps"]]
    assert len(losses) == 3
    assert all(0 < loss < 10 for loss in losses)
    assert losses[-1] < losses[0]


def _reduce_in_several_groups(rank: int) -> None:
    import torch.distributed as dist

    cpu.enable()
    dist.init_process_group("gloo")
    groups = [dist.group.WORLD, *(dist.new_group([0, 1]) for _ in range(4))]
    for number, group in enumerate(groups):
        value = torch.full((3,), float(rank + number))
        dist.all_reduce(value, group=group)
        assert value.tolist() == [2.0 * number + 1] * 3
    impatient = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.barrier(impatient)
    else:
        time.sleep(3)
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    assert names.count("gloo_tcp_loop") == 1
    dist.destroy_process_group()


@pytest.mark.multiprocess
def test_one_thread_serves_all_groups() -> None:
    check_ranks(run_ranks(2, _reduce_in_several_groups))
