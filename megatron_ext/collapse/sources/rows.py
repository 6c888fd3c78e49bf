"""From rows of text cells to a history: what CSV and JSON lines have in common.

Only the columns that are needed become numbers, and rows are taken one at a time, so that a long
file costs a few bytes per row.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources import columns
from megatron_ext.collapse.sources.number import parse_number
from megatron_ext.collapse.sources.options import SourceOptions, same_value
from megatron_ext.errors import UsageError

MOST_RUNS = 50
"""A text column with more values than this tells no runs apart: a date, for example."""


class SeveralRunsError(UsageError):
    """A table holds several runs, told apart by a column.

    Attributes:
        column: its name.
        values: what it holds, sorted.
    """

    def __init__(self, source: str, column: str, values: Sequence[str]) -> None:
        super().__init__(
            f"{source}: holds several runs, {column!r} is one of {columns.listed(values)}: "
            f"choose with --where {column}={values[0]}"
        )
        self.column = column
        self.values = tuple(values)


class NoSuchRunError(UsageError):
    """A table holds no run where the columns have the values asked for."""


class RowReader:
    """Takes the rows of a table and builds a history.

    Args:
        source: the file's name.
        names: the columns, in the order of each row's cells.
        options: what the user wants of it.

    Raises:
        UsageError: A column that is needed is missing or ambiguous.
    """

    def __init__(self, source: str, names: Sequence[str], options: SourceOptions) -> None:
        self._source = source
        self._names = list(names)
        self._where = [(self._index(name), value) for name, value in options.where.items()]
        loss = columns.find_loss(source, names, options.column)
        steps = columns.find_steps(names) if options.axis is None else options.axis
        tokens = columns.find_tokens(names)
        if steps is None and tokens is None:
            raise UsageError(
                f"{source}: no column of steps or tokens among {columns.listed(names)}: "
                "choose with --axis"
            )
        roles = {"loss": loss, "step": steps or tokens, "tokens": tokens}
        roles |= columns.find_extras([name for name in names if name != loss])
        self._split = columns.split_of(loss)
        self._end_column = columns.find_end(names)
        self._roles = {role: self._index(name) for role, name in roles.items() if name is not None}
        self._values = {role: array("d") for role in self._roles}
        used = set(self._roles.values())
        self._rest = [i for i in range(len(names)) if i not in used]
        self._constant: dict[int, str] = {}
        self._varies: dict[int, set[str]] = {}
        self._skipped = 0

    def add(self, cells: Sequence[str], line: int) -> None:
        """Take one row in; one that another run's or that has no loss is passed over.

        Args:
            cells: one text per column; an empty one is a missing value.
            line: its line in the file, from 1.

        Raises:
            UsageError: A step, token count or loss is no number.
        """
        for index, value in self._where:
            if not same_value(cells[index], value):
                return
        loss = cells[self._roles["loss"]]
        step = cells[self._roles["step"]]
        if not loss.strip() or not step.strip():
            self._skipped += 1
            return
        for role, index in self._roles.items():
            cell = cells[index]
            if not cell.strip():
                number = math.nan
            elif role in ("loss", "step", "tokens"):
                number = self._number(cell, line, index, role)
            else:
                number = _lenient(cell)
            self._values[role].append(number)
        self._watch(cells)

    def add_all(self, rows: Sequence[Sequence[str]], lines: Sequence[int]) -> None:
        """Take many rows in, whole columns at a time where all their cells are numbers.

        Args:
            rows: cells as for `add`.
            lines: line of each row in the file.

        Raises:
            UsageError: As for `add`.
        """
        if not self._where and rows and self._add_columns(list(zip(*rows, strict=True))):
            return
        for cells, line in zip(rows, lines, strict=True):
            self.add(cells, line)

    def _add_columns(self, cells: list[tuple[str, ...]]) -> bool:
        """Take columns in, if every cell that is needed is a number; else nothing."""
        numbers: dict[str, array[float]] = {}
        for role, index in self._roles.items():
            if "_" in "".join(cells[index]):
                return False
            try:
                numbers[role] = array("d", map(float, cells[index]))
            except ValueError:
                return False
            axis = role in ("step", "tokens")
            if axis and not np.isfinite(np.frombuffer(numbers[role])).all():
                return False
        for role, values in numbers.items():
            self._values[role].extend(values)
        for index in self._rest:
            seen = sorted(set(cells[index]))[: MOST_RUNS + 1]
            for text in seen:
                self._watch_cell(index, text)
        return True

    def history(self) -> RawHistory:
        """What the rows held.

        Raises:
            UsageError: Nothing, or several runs.
        """
        values: dict[str, Floats] = {
            role: np.frombuffer(numbers, dtype=np.float64).copy() if numbers else np.empty(0)
            for role, numbers in self._values.items()
        }
        steps, losses = values.pop("step"), values.pop("loss")
        if steps.size == 0:
            wanted = ",".join(f"{self._names[i]}={value}" for i, value in self._where)
            detail = f" where {wanted}" if wanted else ""
            raise NoSuchRunError(f"{self._source}: no row with a step and a loss{detail}")
        self._refuse_several_runs(steps)
        tokens = values.pop("tokens", None)
        if tokens is not None and not np.isfinite(tokens).all():
            tokens = None
        metadata = {self._names[i]: text for i, text in self._constant.items()}
        # A column that is repeated in every row is a setting even if it has a role.
        for role in ("lr", "batch_size"):
            column = values.get(role)
            if column is not None and np.isfinite(column).all() and np.ptp(column) == 0:
                metadata.setdefault(self._names[self._roles[role]], repr(float(column[0])))
        end = metadata.get(self._end_column) if self._end_column else None
        where = ",".join(f"{self._names[i]}={value}" for i, value in self._where)
        return RawHistory(
            source=f"{self._source} ({where})" if where else self._source,
            steps=steps,
            losses=losses,
            tokens=tokens,
            extras=values,
            metadata=metadata,
            split="validation" if metadata.get("split", "").startswith("val") else self._split,
            end_step=None if end is None else _lenient(end),
        )

    def _number(self, cell: str, line: int, index: int, role: str) -> float:
        if "_" not in cell:
            try:
                number = float(cell)
                if role == "loss" or math.isfinite(number):
                    return number
            except ValueError:
                pass
        place = f"{self._source}, line {line}, column {self._names[index]!r}"
        parse_number(cell, place)
        raise UsageError(f"{place}: {cell.strip()} is no step")

    def _index(self, name: str) -> int:
        if name not in self._names:
            raise UsageError(
                f"{self._source}: no column {name!r}; there are {columns.listed(self._names)}"
            )
        return self._names.index(name)

    def _watch(self, cells: Sequence[str]) -> None:
        """Note which of the other columns stay the same, and the texts of those that do not."""
        for index in self._rest:
            self._watch_cell(index, cells[index])

    def _watch_cell(self, index: int, text: str) -> None:
        varied = self._varies.get(index)
        if varied is not None:
            if len(varied) <= MOST_RUNS:
                varied.add(text)
        elif self._constant.setdefault(index, text) != text:
            self._varies[index] = {self._constant.pop(index), text}

    def _refuse_several_runs(self, steps: Floats) -> None:
        if not (np.diff(steps) <= 0).any():
            return
        apart = {
            self._names[i]: sorted(seen)
            for i, seen in self._varies.items()
            if len(seen) <= MOST_RUNS and not all(map(_is_number, seen))
        }
        if apart:
            name, seen = next(iter(apart.items()))
            raise SeveralRunsError(self._source, name, seen)


def _lenient(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_number(text: str) -> bool:
    return not text.strip() or not math.isnan(_lenient(text))
