"""Read Megatron's console log: what each iteration reported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Searched, not matched: another rank's unfinished line may stand before the report, and on the
# same line behind it.
_ITERATION = re.compile(r" iteration +(\d+)/ *\d+ \|(.*)")
_TIME = re.compile(r" elapsed time per iteration \(ms\): ([^ |]+) \|")
_LOSS = re.compile(r" lm loss: ([^ |]+) \|")
_GRAD_NORM = re.compile(r" grad norm: ([^ |]+) \|")
_PARAMETERS = re.compile(r" > number of parameters on .*model parallel rank \(.*\): (\d+)")


@dataclass(frozen=True)
class IterationReport:
    """What Megatron's last rank printed after one iteration, with the digits it printed.

    Attributes:
        iteration: number of the iteration, from 1.
        loss: language-model loss, nats per token; None where the iteration was skipped.
        grad_norm: gradient norm before clipping; None where Megatron did not compute it.
        time_ms: milliseconds per iteration since the report before.
    """

    iteration: int
    loss: float | None
    grad_norm: float | None
    time_ms: float


def parse_training_log(lines: Iterable[str]) -> list[IterationReport]:
    """Return the report of every iteration in a log, in the order printed.

    Args:
        lines: the console output of all ranks together; lines that are no report are ignored.
    """
    reports = []
    for line in lines:
        report = _ITERATION.search(line)
        if report is None:
            continue
        fields = report[2]
        time_ms = _number(_TIME, fields)
        if time_ms is None:
            continue
        reports.append(
            IterationReport(
                iteration=int(report[1]),
                loss=_number(_LOSS, fields),
                grad_norm=_number(_GRAD_NORM, fields),
                time_ms=time_ms,
            )
        )
    return reports


def parse_parameter_counts(lines: Iterable[str]) -> list[int]:
    """Return the number of parameters each model-parallel rank reported, in the order printed."""
    return [int(match[1]) for line in lines if (match := _PARAMETERS.search(line))]


def _number(pattern: re.Pattern[str], fields: str) -> float | None:
    """Return the number after a field's name, or None without that field."""
    match = pattern.search(fields)
    return None if match is None else float(match[1])
