"""Pictures of normalised curves and of what is left of runs over their reference."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ext.collapse.alarm import Alarm
from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.check import CheckResult
from megatron_ext.collapse.curve import IGNORED, Curve, smoothed, thin
from megatron_ext.collapse.history import History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DRAWN = 2000


@dataclass(frozen=True)
class RunPicture:
    """A run as it is drawn.

    Attributes:
        name: for the legend.
        t: fractions of training.
        l: normalised loss at `t`.
        residual: `l` minus the reference.
        alarms: where to draw marks.
    """

    name: str
    t: Floats
    l: Floats  # noqa: E741 (the paper's name)
    residual: Floats
    alarms: tuple[Alarm, ...] = ()


def run_picture(
    history: History, result: CheckResult, references: Sequence[Curve], smooth_steps: float
) -> RunPicture:
    """Normalise a run for drawing, by its final or predicted loss; else by its last loss."""
    reference = next(each for each in references if each.source == result.reference)
    smooth = smoothed(history, smooth_steps)
    divisor = result.predicted_final_loss or float(smooth[-1])
    t, values = thin(history.fractions, smooth / divisor, MOST_DRAWN)
    return RunPicture(history.source, t, values, values - reference.at(t), result.alarms)


def draw(references: Sequence[Curve], runs: Sequence[RunPicture]) -> bytes:
    """Draw curves above and residuals below.

    Returns:
        A PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure_of(references, runs))
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()


def figure_of(references: Sequence[Curve], runs: Sequence[RunPicture]) -> Figure:
    """Curves above and residuals below, for matplotlib to save."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    t = np.linspace(0.0, 1.0, 1000)
    for curve in references:
        inside = t[(t >= curve.span[0]) & (t <= curve.span[1])]
        label = f"reference {_short(curve.source)}"
        above.plot(inside, curve.at(inside), color="black", linewidth=2, label=label)
    for run in runs:
        (line,) = above.plot(run.t, run.l, linewidth=1, label=_short(run.name))
        late = run.t >= IGNORED
        below.plot(run.t[late], run.residual[late], linewidth=1, color=line.get_color())
        for alarm in run.alarms:
            for axes in (above, below):
                axes.axvline(alarm.t, color=line.get_color(), linestyle="--", linewidth=1)
    late_values = [run.l[run.t >= IGNORED] for run in runs]
    late_values += [curve.at(t[t >= IGNORED]) for curve in references]
    highest = max((float(values.max()) for values in late_values if values.size), default=1.5)
    lowest = min((float(values.min()) for values in late_values if values.size), default=1.0)
    margin = 0.05 * (highest - lowest) + 1e-6
    above.set_ylim(lowest - margin, highest + 4 * margin)
    above.set_ylabel("loss / final loss")
    above.legend(fontsize="small")
    below.axhline(0.0, color="black", linewidth=1)
    below.set_ylabel("residual")
    below.set_xlabel("fraction of training")
    below.set_xlim(0.0, 1.0)
    return figure


def _short(source: str) -> str:
    name = PurePath(source).name or source
    # A dollar sign would start mathematics.
    return name.replace("$", r"\$")[-60:]
