"""The live limit: how many microbatches a stage may hold at once."""

from __future__ import annotations

import math
import re

_FORM = re.compile(r"(?P<number>\d+(?:\.\d+)?)?(?P<depth>p)?")


def parse_live_limit(text: str, depth: int) -> int:
    """Turn a limit such as ``8``, ``p`` or ``1.5p`` into a number of microbatches.

    Args:
        text: A whole number of microbatches, or a multiple of the pipeline's depth.
        depth: Number of pipeline stages.

    Returns:
        The limit, at least 1; a fraction of a microbatch is rounded up.

    Raises:
        ValueError: `text` has neither form, or gives less than one microbatch.
    """
    match = _FORM.fullmatch(text.strip())
    if not match or not text.strip():
        raise ValueError(f"{text!r} is neither a number of microbatches nor a multiple such as 2p")
    number = match["number"]
    if match["depth"]:
        limit = math.ceil(float(number or 1) * depth - 1e-9)
    elif "." in number:
        raise ValueError(f"{text!r} is not a whole number of microbatches")
    else:
        limit = int(number)
    if limit < 1:
        raise ValueError(f"{text!r} allows no microbatch at all; the least is 1")
    return limit


def tapered(limit: int, stage: int, depth: int) -> int:
    """The limit of a stage where it falls along the pipeline, as 1F1B's depth does.

    Where backwards are whole, a stage far down the pipeline gains nothing from being as far ahead
    as the first one: its forwards only come in the way of backwards that the first one waits for.
    A limit of `depth` gives 1F1B's own depth on every stage.

    Args:
        limit: Of the first stage.
        stage: Number of the stage, from 0.
        depth: Number of pipeline stages.
    """
    return limit - min(stage, stage * (limit - 1) // max(depth - 1, 1))
