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
        self.expects_history = False
        """Whether a checkpoint that is being loaded holds the last update."""
        self._inner: list[Any] = []
        for one in leaf_optimizers(optimizer):
            if getattr(one, "optimizer", None) is not None:
                self._inner.append(one.optimizer)
                self._wrap(one)

    @property
    def holds_history(self) -> bool:
        """Whether the state of the optimizers holds the last update: not if all were skipped."""
        return any(KEY in state for inner in self._inner for state in inner.state.values())

    def make_room(self) -> None:
        """Before a checkpoint with the last update is loaded."""
        self.expects_history = True
        for inner in self._inner:
            for parameter in _parameters(inner):
                # Else the optimizer makes its state, with our key, unless it finds an empty one.
                if inner.state.get(parameter):
                    inner.state[parameter][KEY] = torch.zeros_like(parameter.data)

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
            if not self.expects_history:
                return
            for parameter in _parameters(opt):
                opt.state[parameter][KEY] = torch.zeros_like(parameter.data)

        one.init_state_fn = with_history
        if hasattr(type(one), "optimizer_state_keys"):
            one.__class__ = self._with_history_among_its_keys(type(one))
        elif is_distributed(one):
            self._make_state_before_loading(one)

    def _make_state_before_loading(self, one: Any) -> None:
        """Before Megatron 0.19 a distributed optimizer makes no state but Adam's own to load into.

        It loads whatever tensors its state has, though.
        """
        load = one.load_state_dict

        def load_state_dict(*args: Any, **named: Any) -> None:
            if self.expects_history and not one.optimizer.state:
                one.init_state_fn(one.optimizer, one.config)
            load(*args, **named)

        one.load_state_dict = load_state_dict

    def _with_history_among_its_keys(self, original: type[Any]) -> type[Any]:
        """Megatron's distributed optimizer, saving the last update too: it lists what it saves."""
        plain: Any = original

        def keys(one: Any) -> tuple[str, ...]:
            names: tuple[str, ...] = plain.optimizer_state_keys.fget(one)
            return (*names, KEY) if self.expects_history or self.holds_history else names

        def dtype_of(one: Any, key: str) -> torch.dtype:
            found: torch.dtype = plain._get_state_key_dtype(one, key)
            return torch.float32 if key == KEY else found

        mended: type[Any] = type(
            original.__name__,
            (original,),
            {"optimizer_state_keys": property(keys), "_get_state_key_dtype": dtype_of},
        )
        return mended

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


def is_distributed(one: Any) -> bool:
    """Whether it is Megatron's distributed optimizer."""
    return hasattr(one, "load_parameter_state_from_dp_reshardable")


def saves_listed_states_only(one: Any) -> bool:
    """Whether some formats of its checkpoints hold Adam's states only, whatever else there is.

    So it is with the distributed optimizer of Megatron before 0.19.
    """
    return is_distributed(one) and not hasattr(type(one), "optimizer_state_keys")


def _parameters(inner: Any) -> list[torch.Tensor]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]
