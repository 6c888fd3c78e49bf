"""Error feedback on real optimizers, without a pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.pipedream_2bw.error_feedback import (
    KEY,
    ErrorFeedback,
    saves_listed_states_only,
)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
}


def _with_feedback(name: str, coefficient: float) -> tuple[torch.nn.Parameter, Any, ErrorFeedback]:
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    inner = OPTIMIZERS[name]([parameter])
    feedback = ErrorFeedback(
        SimpleNamespace(optimizer=inner, init_state_fn=lambda *_: None), coefficient
    )
    feedback.records = True
    return parameter, inner, feedback


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicts_the_weights_by_the_last_update(name: str) -> None:
    """For lambda 1: x_T = y_T - (u_{T-1} - u_0), with y the sum of the plain updates.

    The first update is not corrected, so its own size stays as a constant.
    """
    parameter, inner, feedback = _with_feedback(name, 1.0)
    start = parameter.detach().clone()
    updates = []
    for step in range(20):
        # A gradient at the weights, as a delayed run has it: what matters is only that it is used.
        parameter.grad = torch.sin(parameter.detach() * (step + 1))
        feedback.corrects = step > 0
        inner.step()
        updates.append(inner.state[parameter][KEY].clone())
        plain = start - torch.stack(updates).sum(dim=0)
        predicted = plain - (updates[-1] - updates[0])
        torch.testing.assert_close(parameter.detach(), predicted, rtol=1e-12, atol=1e-12)


def test_off_while_training_is_synchronous() -> None:
    parameter, inner, feedback = _with_feedback("sgd", 1.0)
    feedback.records = False
    parameter.grad = torch.ones_like(parameter)
    inner.step()
    assert KEY not in inner.state[parameter]


def test_counts_the_whole_update() -> None:
    """Weight decay and learning rate included."""
    parameter = torch.nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
    inner = torch.optim.SGD([parameter], lr=0.5, weight_decay=0.1)
    feedback = ErrorFeedback(SimpleNamespace(optimizer=inner, init_state_fn=lambda *_: None), 1.0)
    feedback.records = True
    parameter.grad = torch.ones(3, dtype=torch.float64)
    inner.step()
    expected = torch.full((3,), 0.5 * (1 + 0.1 * 2.0), dtype=torch.float64)
    torch.testing.assert_close(inner.state[parameter][KEY], expected)


class _DistributedOptimizer:
    """The parts of Megatron's, before 0.19, that load a checkpoint on a GPU."""

    def __init__(self) -> None:
        self.config = None
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer = OPTIMIZERS["adam"]([self.parameter])

    def init_state_fn(self, inner: Any, _: Any) -> None:
        inner.state[self.parameter]["exp_avg"] = torch.zeros(3)

    def load_state_dict(self, _: Any) -> None:
        if not self.optimizer.state:
            self.optimizer.state[self.parameter]["exp_avg"] = torch.zeros(3)

    def load_parameter_state_from_dp_reshardable(self) -> None: ...


@pytest.mark.parametrize("expects", [True, False])
def test_an_optimizer_without_a_state_gets_room_for_the_last_update(expects: bool) -> None:
    distributed = _DistributedOptimizer()
    assert saves_listed_states_only(distributed)
    feedback = ErrorFeedback(distributed, 1.0)
    if expects:
        feedback.make_room()
    assert not distributed.optimizer.state  # or it would be taken for one that is there already
    distributed.load_state_dict({})
    keys = {"exp_avg", KEY} if expects else {"exp_avg"}
    assert set(distributed.optimizer.state[distributed.parameter]) == keys
