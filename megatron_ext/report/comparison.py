"""A run's loss against the references that lie beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ext.collapse.check import CheckConfig, CheckResult, check
from megatron_ext.collapse.curve import SMOOTH_STEPS, Curve
from megatron_ext.collapse.curve_file import read_curve
from megatron_ext.collapse.history import History
from megatron_ext.collapse.picture import RunPicture, run_picture


def compare(history: History, files: Sequence[Path]) -> tuple[CheckResult, RunPicture, Curve]:
    """Compare a run with the first curve whose controls match, else with the nearest one.

    A curve that does not match is compared all the same: the page shows it and says so.

    Raises:
        UsageError: A file is no curve, or there is too little of the run.
    """
    curves = [replace(read_curve(path), source=str(path)) for path in files]
    result = check(history, curves, CheckConfig(force=True))
    curve = next(each for each in curves if each.source == result.reference)
    return result, run_picture(history, result, curves, SMOOTH_STEPS), curve
