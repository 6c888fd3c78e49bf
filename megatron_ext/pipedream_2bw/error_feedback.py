"""Error feedback: repairs most of what a gradient that is one step old costs.

After an inner optimizer's step with update u_k, the weights become

    W(k+1) = W(k) - u_k - lambda * (u_k - u_{k-1})

with u the whole applied update: learning rate, weight decay, momentum and Newton-Schulz included.
The difference is what the step before should have added and could not, since its gradient was one
step old (arXiv 2606.30634, section 1 of its method). For lambda 1 and without weight decay that is
a prediction of the weights by the last update. What is kept is u_k, not the corrected step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.pipedream_2bw.leaf_optimizers import leaf_optimizers

KEY = "pipedream_2bw_update"
"""Name of u_{k-1} in the state of an optimizer; there it is saved with the rest of the state."""


class ErrorFeedback:
    """Corrects the updates of all inner optimizers of a Megatron optimizer.

    Args:
        optimizer: Megatron's optimizer, plain or chained.
        coefficient: lambda.
    """

    def __init__(self, optimizer: Any, coefficient: float) -> None:
        self.coefficient = coefficient
        self.records = False
        """Whether updates are measured: while training is delayed."""
        self.corrects = False
        """Whether there is an update before this one to correct by."""
        for one in leaf_optimizers(optimizer):
            if getattr(one, "optimizer", None) is not None:
                self._wrap(one)

    def _wrap(self, one: Any) -> None:
        inner = one.optimizer
        step = inner.step

        def corrected(*args: Any, **named: Any) -> Any:
            if not self.records:
                return step(*args, **named)
            return self._step(inner, lambda: step(*args, **named))

        inner.step = corrected
        initialize = one.init_state_fn

        def with_history(opt: Any, *rest: Any) -> None:
            """Makes room for what a checkpoint holds."""
            initialize(opt, *rest)
            for parameter in _parameters(opt):
                opt.state[parameter][KEY] = torch.zeros_like(parameter.data)

        one.init_state_fn = with_history

    @torch.no_grad()
    def _step(self, inner: Any, step: Callable[[], Any]) -> Any:
        parameters = _parameters(inner)
        before = [parameter.detach().clone() for parameter in parameters]
        result = step()
        for parameter, update in zip(parameters, before, strict=True):
            update.sub_(parameter)
            state = inner.state[parameter]
            if self.corrects and (previous := state.get(KEY)) is not None:
                parameter.sub_(self.coefficient * (update - previous))
            state[KEY] = update
        return result


def _parameters(inner: Any) -> list[torch.Tensor]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]
