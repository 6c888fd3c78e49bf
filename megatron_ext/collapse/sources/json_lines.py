"""Losses from JSON lines: one object per line, as many trainers log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.collapse.sources.rows import RowReader
from megatron_ext.errors import UsageError

_LOOKED_AT = 1000
"""Objects from which the names of all columns are taken; trainers log some fields only now and
then."""


def read_json_lines(path: Path, options: SourceOptions) -> RawHistory:
    """Read one run out of a file of JSON objects; nested ones become ``outer/inner``.

    Raises:
        UsageError: A line is no JSON object, or a column is missing or no number.
    """
    names: dict[str, None] = dict.fromkeys(options.where)
    for count, (_, fields) in enumerate(_objects(path)):
        names |= dict.fromkeys(fields)
        if count >= _LOOKED_AT:
            break
    if not names:
        raise UsageError(f"{path}: holds no JSON object with fields")
    reader = RowReader(str(path), list(names), options)
    for line, fields in _objects(path):
        reader.add([fields.get(name, "") for name in names], line)
    return reader.history()


def _objects(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", "is nested too deep")
                raise UsageError(f"{path}, line {line}: is no JSON: {reason}") from None
            if not isinstance(value, dict):
                raise UsageError(f"{path}, line {line}: is no JSON object")
            yield line, dict(_flat(value, ""))


def _flat(value: dict[str, Any], prefix: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    for name, item in value.items():
        if isinstance(item, dict) and depth < 8:
            yield from _flat(item, f"{prefix}{name}/", depth + 1)
        elif item is None or isinstance(item, list | dict):
            continue
        else:
            yield f"{prefix}{name}", item if isinstance(item, str) else json.dumps(item)
