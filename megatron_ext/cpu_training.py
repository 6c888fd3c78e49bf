"""What Megatron's own training needs mended on the CPU, and without the sources of its helper."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_ext.hook import Function


def initialize_megatron(original: Function) -> Function:
    """Megatron's, which starts without CUDA if it is told to."""

    def initialize_megatron(*args: Any, **named: Any) -> Any:
        return original(*args, **{**named, "allow_no_cuda": True})

    return initialize_megatron


def load_checkpoint(original: Function) -> Function:
    """Megatron's, mended for its distributed optimizer on the CPU.

    There, without Transformer Engine and apex, it uses PyTorch's own Adam. It takes the number of
    steps from a state that a new Adam does not have, overwrites what it has read of it, and lets
    all parameters share one counter, which each of them would count up. And parameters in fp32
    are written to although autograd watches them.
    """

    def load_checkpoint(ddp_model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
        adams = _distributed_adams(optimizer)
        for adam in adams:
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        with torch.no_grad():
            result = original(ddp_model, optimizer, *rest, **named)
        for adam in adams:
            for group in adam.param_groups:
                for parameter in group["params"]:
                    # Checkpoints keep the number of steps with the group.
                    adam.state[parameter]["step"] = torch.tensor(float(group.get("step", 0)))
        return result

    return load_checkpoint


def _distributed_adams(optimizer: Any) -> list[torch.optim.Optimizer]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    wrapped = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [each.optimizer for each in wrapped if isinstance(each, DistributedOptimizer)]
    return [each for each in inner if isinstance(each, torch.optim.Adam | torch.optim.AdamW)]


def compile_helpers(_: Function) -> Function:
    """Instead of Megatron's, which wants a Makefile that a wheel does not bring."""

    def compile_helpers() -> None:
        importlib.import_module("megatron.core.datasets.helpers_cpp")

    return compile_helpers
