"""Explicit task times: ``--durations FILE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import UsageError
from megatron_ext.simulate.jitter_law import Array
from megatron_ext.simulate.task_times import TaskTimes


def read_durations(path: Path, chunks: int, weight_share: float) -> TaskTimes:
    """Read a JSON object with F, B and perhaps W, each as [virtual stage][microbatch].

    Virtual stages are in the order in which the model runs. With W, B is the rest of the backward;
    without it B is the whole, of which `weight_share` is split off where a schedule splits.

    Raises:
        UsageError: The file is no such object, or a time is negative.
    """
    flag = f"--durations {path}"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{flag}: cannot read it ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{flag} is no JSON: {error}") from None
    if not isinstance(document, dict) or not {"F", "B"} <= set(document) <= {"F", "B", "W"}:
        raise UsageError(f'{flag} holds no object with "F", "B" and perhaps "W"')
    tables = {name: _table(flag, name, rows) for name, rows in document.items()}
    shapes = {table.shape for table in tables.values()}
    if len(shapes) > 1:
        sizes = ", ".join(f"{name} {table.shape}" for name, table in tables.items())
        raise UsageError(f"{flag}: tables differ in stages or microbatches: {sizes}")
    virtual = len(tables["F"])
    if virtual % chunks:
        raise UsageError(f"{flag}: {virtual} rows are no multiple of --chunks {chunks}")
    stages = virtual // chunks
    order = [chunk * stages + stage for stage in range(stages) for chunk in range(chunks)]
    forward, backward = tables["F"][order], tables["B"][order]
    if "W" in tables:
        weight = tables["W"][order]
        return TaskTimes(forward, backward + weight, weight)
    return TaskTimes(forward, backward, backward * weight_share)


def _table(flag: str, name: str, rows: Any) -> Array:
    try:
        table = np.array(rows, dtype=float)
    except (TypeError, ValueError):
        table = np.zeros(0)
    if table.ndim != 2 or not table.size:
        raise UsageError(f'{flag}: "{name}" is no table [stage][microbatch] of numbers')
    bad = np.argwhere(~((table >= 0) & (table < np.inf)))
    if len(bad):
        stage, microbatch = bad[0]
        value = table[stage, microbatch]
        raise UsageError(
            f'{flag}: "{name}"[{stage}][{microbatch}] is {value:g}; '
            "a time is finite and not negative"
        )
    return table
