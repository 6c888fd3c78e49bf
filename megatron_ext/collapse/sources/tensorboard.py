"""Losses from a TensorBoard directory, read by TensorBoard's own reader."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.collapse.sources.series import from_series
from megatron_ext.errors import UsageError


def is_tensorboard(path: Path) -> bool:
    """Whether a directory holds TensorBoard's event files."""
    return any(path.glob("*tfevents*"))


def read_tensorboard(path: Path, options: SourceOptions) -> RawHistory:
    """Read the scalars of all event files in a directory, older files first.

    Raises:
        UsageError: TensorBoard is not installed, or there is no such scalar.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UsageError(f"{path}: to read TensorBoard's files: pip install tensorboard") from None
    # It warns, with its own prefix, of a file that ends in the middle of a record.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    try:
        # Restarts are dealt with, and reported, where all sources are.
        events = EventAccumulator(
            str(path), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False
        )
        events.Reload()
        scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    except Exception as error:  # whatever a damaged file makes its parsers raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path}: TensorBoard cannot read it: {reason}") from None
    if not scalars:
        raise UsageError(f"{path}: its event files hold no scalars")
    metrics = {
        tag: (
            np.array([point.step for point in points], dtype=np.float64),
            np.array([point.value for point in points], dtype=np.float64),
        )
        for tag, points in scalars.items()
        if not tag.endswith(" vs samples")
    }
    return from_series(str(path), metrics, options)
