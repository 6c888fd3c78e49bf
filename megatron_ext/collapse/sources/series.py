"""From metrics logged one by one, each with steps of its own, to a history."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources import columns
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.errors import UsageError

type Series = tuple[Floats, Floats]
"""Steps and values of one metric, in the order logged."""


def from_series(
    source: str,
    metrics: Mapping[str, Series],
    options: SourceOptions,
    metadata: dict[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> RawHistory:
    """Choose the loss among `metrics` and put what goes along beside it.

    Args:
        source: name for messages.
        metrics: every metric that was logged.
        options: what the user wants of it.
        metadata: settings of the run.
        notes: what the reader repaired.

    Raises:
        UsageError: There is no such loss, or several could be meant.
    """
    if options.where:
        raise UsageError(f"{source}: holds one run, --where does not apply")
    names = [name for name, (steps, _) in metrics.items() if steps.size]
    loss = columns.find_loss(source, names, options.column)
    steps, losses = metrics[loss]
    roles = columns.find_extras([name for name in names if name != loss])
    extras = {role: _values_at(steps, metrics[name]) for role, name in roles.items()}
    tokens_name = columns.find_tokens(names)
    tokens = None if tokens_name is None else _values_at(steps, metrics[tokens_name])
    if tokens is not None and not np.isfinite(tokens).all():
        tokens = None
    end = columns.find_end(list(metadata or {}))
    return RawHistory(
        source=source,
        steps=steps,
        losses=losses,
        tokens=tokens,
        extras=extras,
        metadata=metadata or {},
        split=columns.split_of(loss),
        end_step=_positive((metadata or {}).get(end, "")) if end else None,
        notes=notes,
    )


def _values_at(steps: Floats, series: Series) -> Floats:
    """The metric's last value at each step; NaN where it was not logged."""
    theirs, values = series
    last = dict(zip(theirs.tolist(), values.tolist(), strict=True))
    return np.array([last.get(step, np.nan) for step in steps.tolist()], dtype=np.float64)


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number > 0 else None
