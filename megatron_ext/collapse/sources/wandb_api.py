"""Losses of a run on a wandb server, through wandb's public API."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources import columns
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.collapse.sources.series import Series, from_series
from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine

PREFIX = "wandb:"
"""``wandb:ENTITY/PROJECT/RUN_ID`` names a run on the server that wandb is logged in to."""


def read_wandb_api(name: str, options: SourceOptions) -> RawHistory:
    """Download one run's history.

    Args:
        name: ``wandb:ENTITY/PROJECT/RUN_ID``.
        options: what the user wants of it.

    Raises:
        UsageError: wandb is not installed or not logged in, or there is no such run or metric.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError(f"{name}: to ask a wandb server: pip install wandb") from None
    path = name.removeprefix(PREFIX)
    if len(path.split("/")) != 3:
        raise UsageError(f"{name}: is not wandb:ENTITY/PROJECT/RUN_ID")
    try:
        run = wandb.Api().run(path)
        summary: Any = run.summary
        known = [key for key in summary.keys() if not key.startswith("_")]  # noqa: SIM118
        loss = columns.find_loss(name, known, options.column)
        extras = list(columns.find_extras([key for key in known if key != loss]).values())
        points: dict[str, tuple[list[float], list[float]]] = {}
        # One request for the loss alone: the server leaves out steps that lack any key asked for.
        for keys in ([loss], *([extra] for extra in extras)):
            with ProgressLine(f"download {path}", None, "points") as progress:
                for count, row in enumerate(run.scan_history(keys=["_step", *keys])):
                    progress.update(count)
                    value = _number(row.get(keys[0]))
                    if value is not None and row.get("_step") is not None:
                        steps, values = points.setdefault(keys[0], ([], []))
                        steps.append(float(row["_step"]))
                        values.append(value)
        config = {key: str(value) for key, value in dict(run.config).items()}
    except UsageError:
        raise
    except Exception as error:  # wandb raises errors of its own, requests' and the server's
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{name}: wandb says: {reason}") from None
    metrics: dict[str, Series] = {
        key: (np.array(steps), np.array(values)) for key, (steps, values) in points.items()
    }
    return from_series(name, metrics, options, config)


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    return float(value) if isinstance(value, int | float) else None
