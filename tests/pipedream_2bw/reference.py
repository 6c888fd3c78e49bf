"""Two weight versions as plainly as they can be written, inside Megatron's own loop.

Megatron's own schedule runs every batch alone; before it the weights of the version are copied in,
after it the newest are copied back. Nothing of `megatron_ext.pipedream_2bw` is used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def install(
    record: dict[str, Any], *, coefficient: float = 1.0, start: int = 0, end: int | None = None
) -> None:
    """Make Megatron's loop train one step late, from iteration `start` to before `end`.

    Args:
        record: The rank's record.
        coefficient: lambda of the error feedback.
    """
    from megatron.training import get_args, training

    setup = training.setup_model_and_optimizer
    get_schedule = training.get_forward_backward_func
    state: dict[str, Any] = {}

    def delayed(iteration: int) -> bool:
        return start <= iteration and (end is None or iteration < end)

    def setup_model_and_optimizer(*args: Any, **named: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **named)
        parameters = [p for chunk in model for p in chunk.parameters() if p.requires_grad]
        state["parameters"] = parameters
        state["older"] = state["newest"] = _copy(parameters)
        for one in _leaves(optimizer):
            if one.optimizer is not None:
                _feed_back(one.optimizer, coefficient, start, delayed)
        step = optimizer.step

        def stepping() -> Any:
            outcome = step()
            state["older"], state["newest"] = state["newest"], _copy(parameters)
            return outcome

        optimizer.step = stepping
        return model, optimizer, scheduler

    def get_forward_backward_func(*args: Any, **named: Any) -> Any:
        schedule = get_schedule(*args, **named)

        @functools.wraps(schedule)
        def on_its_version(**call: Any) -> Any:
            iteration = get_args().curr_iteration
            if call["forward_only"] or not delayed(iteration) or iteration == start:
                return schedule(**call)
            _paste(state["older"], state["parameters"])
            losses = schedule(**call)
            _paste(state["newest"], state["parameters"])
            return losses

        return on_its_version

    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.get_forward_backward_func = get_forward_backward_func


def _feed_back(inner: Any, coefficient: float, start: int, delayed: Any) -> None:
    from megatron.training import get_args

    step = inner.step
    parameters = [p for group in inner.param_groups for p in group["params"]]
    last: list[torch.Tensor] = []

    @torch.no_grad()
    def corrected(*args: Any, **named: Any) -> Any:
        iteration = get_args().curr_iteration
        before = _copy(parameters)
        outcome = step(*args, **named)
        updates = [old - new for old, new in zip(before, parameters, strict=True)]
        if delayed(iteration):
            if coefficient and last and iteration > start:
                for parameter, update, previous in zip(parameters, updates, last, strict=True):
                    parameter.sub_(coefficient * (update - previous))
            last[:] = updates
        return outcome

    inner.step = corrected


def _leaves(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [leaf for one in chained for leaf in _leaves(one)]


def _copy(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def _paste(values: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        parameter.copy_(value)
