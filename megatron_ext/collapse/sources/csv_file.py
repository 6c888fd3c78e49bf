"""Losses from a CSV file: any column names, comma, semicolon or tab, wandb's export included."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.collapse.sources.rows import RowReader
from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine

_REPORT_EVERY = 50_000


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
                reader.add_all(_rows(file, path, delimiter, len(names), progress))
    except csv.Error as error:
        raise UsageError(f"{path}: is no CSV: {error}") from None
    return reader.history()


def _rows(
    file: Iterator[str], path: Path, delimiter: str, width: int, progress: ProgressLine
) -> Iterator[tuple[int, Sequence[str]]]:
    rows = csv.reader(file, delimiter=delimiter)
    for cells in rows:
        if not cells:
            continue
        if len(cells) != width:
            raise UsageError(
                f"{path}, line {rows.line_num + 1}: has {len(cells)} cells, the header {width}"
            )
        if rows.line_num % _REPORT_EVERY == 0:
            progress.update(rows.line_num)
        yield rows.line_num + 1, cells
