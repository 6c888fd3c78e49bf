"""Runs for tests: synthetic ones with known properties, and the public ones where they are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.controls import Controls
from megatron_ext.collapse.curve import Curve
from megatron_ext.collapse.form import Form
from megatron_ext.collapse.history import History
from megatron_ext.collapse.schedule import NamedSchedule

SCHEDULE = NamedSchedule("linear", warmup=0.05)
CONTROLS = Controls(params=1e8, tokens=2e9, batch_tokens=5e5, lr_peak=1e-3, weight_decay=0.1)
FORM = Form(b=0.15, q=0.2)


def reference(points: int = 500, **controls: object) -> Curve:
    """A noiseless curve of the form."""
    t = np.arange(1, points + 1) / points
    known = {**vars(CONTROLS), "schedule": SCHEDULE, **controls}
    return Curve(
        "reference",
        controls=Controls(**known),  # type: ignore[arg-type]
        final_loss=3.0,
        t=t,
        l=FORM.at(t, SCHEDULE),
    )


def run(
    points: int = 400,
    noise: float = 0.001,
    seed: int = 0,
    fault: Floats | float = 0.0,
    scale: float = 2.5,
) -> tuple[Floats, Floats]:
    """t and losses of a run of another size.

    Args:
        points: number of them.
        noise: standard deviation over the loss.
        seed: of the noise.
        fault: added over the loss, at every point.
        scale: final loss.
    """
    t = np.arange(1, points + 1) / points
    noises = np.random.default_rng(seed).normal(0.0, noise, points)
    return t, scale * FORM.at(t, SCHEDULE) * (1 + noises + fault)


def history(t: Floats, losses: Floats, **more: object) -> History:
    """A history of one step per point."""
    return History("run", np.arange(1.0, t.size + 1), losses, **more)  # type: ignore[arg-type]


def public(name: str) -> Path:
    """A file of public curves; skips the test without it."""
    folder = Path(
        os.environ.get("MEGATRON_EXT_CURVES", Path(__file__).parents[2] / "../shared/curves")
    )
    if not (folder / name).is_file():
        pytest.skip(f"no public curves: MEGATRON_EXT_CURVES does not lead to {name}")
    return folder / name


def check_one_line(error: Exception) -> None:
    """An error for a user is one line."""
    assert str(error)
    assert "\n" not in str(error)
