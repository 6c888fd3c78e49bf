"""Losses from Megatron's console log, with what it says of learning rate, batch and arguments."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources.columns import normalised
from megatron_ext.collapse.sources.number import parse_number
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.errors import UsageError

# Searched, not matched: ranks write into the same file and a time stamp may stand before it.
_TRAINING = re.compile(r" iteration +(\d+)/ *(\d+) \|(.*)")
_VALIDATION = re.compile(r" validation loss at iteration (\d+) \|(.*)")
_FIELD = re.compile(r" *([^|:]+): +([^ |]+) *\|")
_VALUE = re.compile(r" *([^|:]+) value: +([^ |]+) *\|")
_ARGUMENT = re.compile(r"^ *(?:\d+: *)?([a-z][a-z0-9_]*) \.{3,} (.*)$")
_PARAMETERS = re.compile(r" > number of parameters on .*model parallel rank \(.*\): (\d+)")
_EXTRAS = {
    "learning rate": "lr",
    "grad norm": "grad_norm",
    "global batch size": "batch_size",
    "consumed samples": "samples",
    "number of skipped iterations": "skipped",
}


def is_megatron_log(lines: Iterable[str]) -> bool:
    """Whether these lines hold a report or an argument of Megatron."""
    return any(
        _TRAINING.search(line) or _VALIDATION.search(line) or _ARGUMENT.match(line)
        for line in lines
    )


def read_megatron_log(path: Path, options: SourceOptions) -> RawHistory:
    """Read the training losses, or with ``--column "lm loss validation"`` those of evaluations.

    Raises:
        UsageError: There is no such loss, or a number is malformed; the line is named.
    """
    if options.where:
        raise UsageError(f"{path}: is a Megatron log of one run, --where does not apply")
    wanted = normalised(options.column or "lm loss")
    validation = wanted.endswith(" validation")
    name = wanted.removesuffix(" validation")
    steps, losses = array("d"), array("d")
    extras = {role: array("d") for role in _EXTRAS.values()}
    metadata: dict[str, str] = {}
    parameters: dict[str, int] = {}
    end: float | None = None
    seen: set[str] = set()
    with path.open(encoding="utf-8", errors="replace") as file:
        for line_number, line in enumerate(file, 1):
            if report := _TRAINING.search(line):
                end = float(report[2])
                fields = {normalised(key): value for key, value in _FIELD.findall(report[3])}
                seen |= fields.keys()
                # A skipped iteration has no loss.
                if validation or name not in fields:
                    continue
                place = f"{path}, line {line_number}, {name!r}"
                steps.append(float(report[1]))
                losses.append(parse_number(fields[name], place))
                for key, role in _EXTRAS.items():
                    extras[role].append(
                        parse_number(fields[key], f"{path}, line {line_number}, {key!r}")
                        if key in fields
                        else np.nan
                    )
            elif report := _VALIDATION.search(line):
                values = {normalised(key): text for key, text in _VALUE.findall(report[2])}
                seen |= {f"{key} validation" for key in values}
                if validation and name in values:
                    place = f"{path}, line {line_number}, {wanted!r}"
                    steps.append(float(report[1]))
                    losses.append(parse_number(values[name], place))
            elif setting := _ARGUMENT.match(line):
                metadata[setting[1]] = setting[2].strip()
            elif counted := _PARAMETERS.search(line):
                parameters[line.split("rank", 1)[1]] = int(counted[1])
    if not steps:
        there = ", ".join(sorted(key for key in seen if "loss" in key)) or "no loss at all"
        raise UsageError(f"{path}: has no {wanted!r}; there is {there}")
    if parameters:
        metadata.setdefault("params", str(sum(parameters.values())))
    columns = {} if validation else {role: np.array(values) for role, values in extras.items()}
    samples = columns.get("samples")
    length = metadata.get("seq_length", "")
    tokens = None
    if samples is not None and np.isfinite(samples).all() and length.isdigit():
        tokens = samples * float(length)
    return RawHistory(
        source=str(path),
        steps=np.array(steps),
        losses=np.array(losses),
        tokens=tokens,
        extras={role: values for role, values in columns.items() if not np.isnan(values).all()},
        metadata=metadata,
        split="validation" if validation else "train",
        end_step=end,
    )
