"""Megatron chains optimizers, and chains of them again; each leaf steps parameters of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaf_optimizers(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, or the optimizer itself if it is none."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
        return
    for one in chained:
        yield from leaf_optimizers(one)
