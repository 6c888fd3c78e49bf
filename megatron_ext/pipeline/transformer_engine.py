"""Splits the backward of Transformer Engine's layers, through their own interface.

A layer of Transformer Engine that was built to delay its weight gradients queues what they are
made of, a microbatch at a time, until its `backward_dw` is called. Megatron has a setting for
that, `delay_wgrad_compute`, which it allows only with a schedule of its own for experts. Here the
setting is made where Megatron builds its configuration and its data parallelism, and nowhere else,
so that to everything else the run is one without it.

Source: RRFP (arXiv 2605.18750), section 4, on splitting weight gradients off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ext.errors import UsageError

_SETTING = "delay_wgrad_compute"
_DELAYED = "skip_backward_post_hook"
"""Transformer Engine's mark on a parameter whose gradient `backward_dw` computes."""


class DelayedLayer:
    """A layer that keeps its weight gradients until they are asked for, oldest first.

    Args:
        module: Has parameters, `wgrad_store`, whose `context` is a queue, and `backward_dw`.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.weights = [p for p in module.parameters() if getattr(p, _DELAYED, False)]
        """Those whose gradients it delays."""
        self._known = 0
        """Entries of the queue that belong to microbatches already counted."""

    def count_new(self) -> int:
        """How many entries came since the last call: those of the microbatch that ends here.

        None if the layer had no part in it, several if it ran several times.
        """
        new = self._queued() - self._known
        self._known += new
        return new

    def run(self, entries: int) -> None:
        """Accumulate what the oldest `entries` of the queue are made of.

        The layer itself tells Megatron's data parallelism, through hooks that were registered with
        it, each time that it computes.
        """
        until = self._queued() - entries
        while self._queued() > until:  # a layer made of two takes two at once
            before = self._queued()
            self._module.backward_dw()
            if self._queued() >= before:
                raise RuntimeError(
                    f"{type(self._module).__name__} keeps weight gradients back and does not "
                    "compute them when asked: use --rrfp-hint bf"
                )
        self._known -= entries

    def _queued(self) -> int:
        size: int = self._module.wgrad_store.context.qsize()
        return size


def delayed_layers(model: Any) -> list[DelayedLayer]:
    """The layers of a model chunk that delay their weight gradients, last one first."""
    return [DelayedLayer(module) for module in model.modules() if _delays(module)][::-1]


def _delays(module: Any) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def check_can_delay(args: Any, hint: str) -> None:
    """Raise if layers of Transformer Engine cannot be split in this run.

    Args:
        args: Megatron's validated arguments.
        hint: What the user asked for.

    Raises:
        UsageError: Transformer Engine is too old, or a setting keeps it from delaying.
    """
    from megatron.core.utils import is_te_min_version

    least = "2.8.0" if args.overlap_grad_reduce else "2.3.0"
    advice = "or use --rrfp-hint bf"
    if not is_te_min_version(least):
        raise UsageError(
            f"--rrfp-hint {hint} needs Transformer Engine {least} or later, which can delay "
            f"weight gradients: update it, {advice}"
        )
    for name, flag in (
        ("tp_comm_overlap", "--tp-comm-overlap"),
        ("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser"),
        (
            "overlap_dispatch_backward_with_experts_wgrad",
            "--overlap-dispatch-backward-with-experts-wgrad",
        ),
    ):
        if getattr(args, name, False):
            raise UsageError(
                f"--rrfp-hint {hint} does not go with {flag}: Transformer Engine cannot delay "
                f"weight gradients then; leave it out, {advice}"
            )


def delaying_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's making of a model's configuration, with the setting made after its checks."""

    def core_transformer_config_from_args(args: Any, *rest: Any, **named: Any) -> Any:
        with _set(args, False):
            config = original(args, *rest, **named)
        config.delay_wgrad_compute = True
        return config

    return core_transformer_config_from_args


def delaying_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's making of a model, which takes settings of data parallelism from the arguments."""

    def get_model(*args: Any, **named: Any) -> Any:
        from megatron.training import get_args

        with _set(get_args(), True):
            return original(*args, **named)

    return get_model


@contextlib.contextmanager
def _set(args: Any, value: bool) -> Iterator[None]:
    before = getattr(args, _SETTING, False)
    setattr(args, _SETTING, value)
    try:
        yield
    finally:
        setattr(args, _SETTING, before)
