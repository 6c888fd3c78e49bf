"""Where loss histories come from; `read_history` finds out what it was given."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path

from megatron_ext.collapse.history import History, RawHistory, tidy
from megatron_ext.collapse.sources.csv_file import read_csv
from megatron_ext.collapse.sources.json_lines import read_json_lines
from megatron_ext.collapse.sources.megatron_log import is_megatron_log, read_megatron_log
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.collapse.sources.rows import NoSuchRunError, SeveralRunsError
from megatron_ext.collapse.sources.tensorboard import is_tensorboard, read_tensorboard
from megatron_ext.collapse.sources.wandb_api import PREFIX, read_wandb_api
from megatron_ext.collapse.sources.wandb_folder import find_wandb_file, read_wandb
from megatron_ext.errors import UsageError

__all__ = ["SourceOptions", "read_histories", "read_history"]

MOST_RUNS = 100
"""`read_histories` reads at most so many."""

_LINES_LOOKED_AT = 20_000
"""Megatron prints its arguments and what it builds before the first iteration."""


def read_history(name: str, options: SourceOptions | None = None) -> History:
    """Read a run's losses from whatever `name` is.

    Args:
        name: a CSV file, JSON lines, a Megatron console log, a TensorBoard directory, a wandb run
            directory or ``.wandb`` file, or ``wandb:ENTITY/PROJECT/RUN_ID``.
        options: which of its losses.

    Raises:
        UsageError: It cannot be read, or holds no or several such losses.
    """
    options = options or SourceOptions()
    return tidy(_read(name, options), options.end_step)


def read_histories(name: str, options: SourceOptions) -> list[History]:
    """Read every run that `name` holds where `options` leave several.

    Conditions that no row meets are left out one by one: of a run of another file, say.

    Raises:
        UsageError: It cannot be read, or holds more than `MOST_RUNS`.
    """
    try:
        return [read_history(name, options)]
    except SeveralRunsError as several:
        runs: list[History] = []
        for value in several.values:
            where = {**options.where, several.column: value}
            runs += read_histories(name, replace(options, where=where))
            if len(runs) > MOST_RUNS:
                raise UsageError(f"{name}: holds more than {MOST_RUNS} runs: --where") from None
        return runs
    except NoSuchRunError:
        for left_out in options.where:
            where = {key: value for key, value in options.where.items() if key != left_out}
            with contextlib.suppress(NoSuchRunError):
                return read_histories(name, replace(options, where=where))
        raise


def _read(name: str, options: SourceOptions) -> RawHistory:
    if name.startswith(PREFIX):
        return read_wandb_api(name, options)
    path = Path(name)
    try:
        if not path.exists():
            raise UsageError(f"{name}: no such file or directory")
        if wandb_file := find_wandb_file(path):
            return read_wandb(wandb_file, options)
        if path.is_dir():
            if is_tensorboard(path):
                return read_tensorboard(path, options)
            raise UsageError(f"{name}: is a directory with neither TensorBoard's nor wandb's files")
        return _read_text(path, options)
    except (OSError, ValueError) as error:
        # ValueError: a name with a NUL byte.
        raise UsageError(f"{name}: cannot be read: {error}") from None


def _read_text(path: Path, options: SourceOptions) -> RawHistory:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        start = file.read(1 << 16)
    first = next((line for line in start.splitlines() if line.strip()), "")
    if not first:
        raise UsageError(f"{path}: is empty")
    if first.lstrip().startswith("{") and path.suffix != ".csv":
        return read_json_lines(path, options)
    if path.suffix not in (".csv", ".tsv"):
        with path.open(encoding="utf-8", errors="replace") as file:
            if is_megatron_log(itertools.islice(file, _LINES_LOOKED_AT)):
                return read_megatron_log(path, options)
    if not any(delimiter in first for delimiter in ",;\t"):
        raise UsageError(f"{path}: is no CSV, no JSON lines and no Megatron log")
    return read_csv(path, options)
