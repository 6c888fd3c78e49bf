"""Losses from a CSV file: any column names, comma, semicolon or tab, wandb's export included."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.collapse.sources.rows import RowReader
from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine

_CHUNK = 20_000
"""Rows that become numbers together."""


def read_csv(path: Path, options: SourceOptions) -> RawHistory:
    """Read one run out of a CSV file with a header.

    Raises:
        UsageError: The file is empty, is no CSV, lacks a column, holds several runs, or has text
            where a number should be; the line and column are named.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            header = file.readline()
            if not header.strip():
                raise UsageError(f"{path}: is empty or has no header")
            delimiter = max(",;\t", key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter))]
            reader = RowReader(str(path), names, options)
            with ProgressLine(f"read {path.name}", None, "rows") as progress:
                for rows, lines in _chunks(file, path, delimiter, len(names)):
                    reader.add_all(rows, lines)
                    progress.update(lines[-1])
    except csv.Error as error:
        raise UsageError(f"{path}: is no CSV: {error}") from None
    return reader.history()


def _chunks(
    file: Iterator[str], path: Path, delimiter: str, width: int
) -> Iterator[tuple[list[list[str]], list[int]]]:
    """Rows and their lines, some thousands at a time."""
    reader = csv.reader(file, delimiter=delimiter)
    rows: list[list[str]] = []
    lines: list[int] = []
    for cells in reader:
        if len(cells) != width:
            if not cells:
                continue
            raise UsageError(
                f"{path}, line {reader.line_num + 1}: has {len(cells)} cells, the header {width}"
            )
        rows.append(cells)
        lines.append(reader.line_num + 1)
        if len(rows) == _CHUNK:
            yield rows, lines
            rows, lines = [], []
    if rows:
        yield rows, lines
