"""Fit the paper's form to one curve or to a family of curves.

The objective is the mean absolute error for t >= 0.2, as in arXiv 2509.25087, Section 4, smoothed
at the scale of the noise so that a gradient exists. The paper searches on grids; here each start
of a coarse grid is followed down by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import OptimizeResult, least_squares

from megatron_ext.collapse.arrays import Floats, Truths
from megatron_ext.collapse.curve import IGNORED, Curve
from megatron_ext.collapse.form import FamilyForm, Form
from megatron_ext.collapse.schedule import Schedule
from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine

GRID_POINTS = 200
"""Points in t at which curve and form are compared, so that dense parts do not outweigh others."""
ROBUST_SCALE = 0.002
"""Residuals beyond this count by their size and no longer by its square."""
STARTS_B = (0.03, 0.1, 0.3, 1.0)
STARTS_Q = (0.1, 0.5, 2.0)
LOWEST = (math.log(1e-4), math.log(1e-2))
HIGHEST = (math.log(1e2), math.log(30.0))
"""Bounds of log b and log q; the paper's optima lie within 0.1 to 1."""
LEAST_RANGE = 1.1
"""An exponent is fitted where the curves' tau or TPP differ at least so many times."""
INDISTINCT_CORRELATION = 0.95
INDISTINCT_ERROR = 0.5
"""Correlation of log b and log q, and standard error of either, from which on they cannot be told
apart."""


@dataclass(frozen=True)
class CurveFit:
    """A form fitted to one curve.

    Attributes:
        form: the parameters.
        error: mean |l - l_fit| for t >= 0.2, as a fraction.
        b_error: relative standard error of b.
        q_error: relative standard error of q.
        correlation: of the estimates of log b and log q.
    """

    form: Form
    error: float
    b_error: float
    q_error: float
    correlation: float

    @property
    def indistinct(self) -> bool:
        """Whether b and q cannot be told apart from this curve."""
        unclear = max(self.b_error, self.q_error) > INDISTINCT_ERROR
        return unclear or abs(self.correlation) > INDISTINCT_CORRELATION


@dataclass(frozen=True)
class FamilyFit:
    """A form fitted to several curves at once.

    Attributes:
        form: b over tau and q over TPP.
        errors: mean |l - l_fit| for t >= 0.2 of each curve, as fractions.
        held_out: the same of each curve from a fit to the others; None where that says nothing.
        parameter_errors: standard errors of log b_c, b_e, log q_c and q_e; infinite where fixed.
        notes: what the curves do not determine.
    """

    form: FamilyForm
    errors: tuple[float, ...]
    held_out: tuple[float | None, ...]
    parameter_errors: tuple[float, float, float, float]
    notes: tuple[str, ...]


def fit_curve(curve: Curve) -> CurveFit:
    """Fit b and q to one curve.

    Raises:
        UsageError: Its schedule is not known, or it has too few points for t >= 0.2.
    """
    schedule = _schedule_of(curve)
    t, values = _grid(curve)

    def residuals(parameters: Floats) -> Floats:
        b, q = np.exp(parameters)
        return Form(b=float(b), q=float(q)).at(t, schedule) - values

    starts = [np.log([b, q]) for b in STARTS_B for q in STARTS_Q]
    best = _best(residuals, starts, np.array(LOWEST), np.array(HIGHEST))
    errors, correlation = _uncertainty(best)
    b, q = np.exp(best.x)
    form = Form(b=float(b), q=float(q))
    return CurveFit(
        form=form,
        error=float(np.abs(residuals(best.x)).mean()),
        b_error=float(errors[0]),
        q_error=float(errors[1]),
        correlation=float(correlation[0, 1]),
    )


def fit_family(curves: Sequence[Curve], hold_out: bool = True) -> FamilyFit:
    """Fit b over tau and q over TPP to several curves.

    An exponent that the curves do not determine, because all share one tau or one TPP, is 0.

    Args:
        curves: with known tau, TPP and schedule.
        hold_out: also fit without each curve in turn; takes as many fits.

    Raises:
        UsageError: Fewer than two curves, or a control of one is not known.
    """
    if len(curves) < 2:
        raise UsageError("a joint fit needs at least two curves")
    total = 1 + len(curves) * hold_out
    with ProgressLine("joint fit", total, "fits") as progress:
        best, notes = _fit_jointly(curves)
        form = _family(best.x)
        held_out: list[float | None] = []
        for place, curve in enumerate(curves):
            progress.update(1 + place)
            others = [*curves[:place], *curves[place + 1 :]]
            if not hold_out or len(others) < 2:
                held_out.append(None)
                continue
            without, _ = _fit_jointly(others, start=best.x)
            held_out.append(_error_of(curve, _family(without.x)))
    errors, _ = _uncertainty(best, _free(curves))
    b_c, b_e, q_c, q_e = (float(error) for error in errors)
    return FamilyFit(
        form=form,
        errors=tuple(_error_of(curve, form) for curve in curves),
        held_out=tuple(held_out),
        parameter_errors=(b_c, b_e, q_c, q_e),
        notes=tuple(notes),
    )


def with_form(curve: Curve, fit: CurveFit) -> Curve:
    """The curve with its fitted form beside its points."""
    return replace(curve, form=fit.form)


def _fit_jointly(
    curves: Sequence[Curve], start: Floats | None = None
) -> tuple[OptimizeResult, list[str]]:
    taus, tpps = [_tau_of(curve) for curve in curves], [_tpp_of(curve) for curve in curves]
    schedules = [_schedule_of(curve) for curve in curves]
    grids = [_grid(curve) for curve in curves]
    notes = []
    lowest, highest = np.array([LOWEST[0], -3.0, LOWEST[1], -3.0]), np.array([5.0, 3.0, 5.0, 3.0])
    for place, (name, values) in {1: ("tau", taus), 3: ("TPP", tpps)}.items():
        if max(values) / min(values) < LEAST_RANGE:
            which = "b" if place == 1 else "q"
            notes.append(f"all curves have one {name}: the exponent of {which} is set to 0")
            lowest[place], highest[place] = -1e-9, 1e-9

    def residuals(parameters: Floats) -> Floats:
        family = _family(parameters)
        return np.concatenate(
            [
                # Every curve counts alike, as in the paper's unweighted mean over curves.
                family.curve(tau, tpp).at(t, schedule) - values
                for tau, tpp, schedule, (t, values) in zip(
                    taus, tpps, schedules, grids, strict=True
                )
            ]
        )

    if start is not None:
        inside = np.clip(start, lowest + 1e-12, highest - 1e-12)
        return _best(residuals, [inside], lowest, highest), notes
    middle_tau = float(np.median(taus))
    starts = []
    for b in STARTS_B[1:]:
        for q in STARTS_Q:
            for exponent in (-0.5, 0.0):
                b_e = float(np.clip(exponent, lowest[1], highest[1]))
                first = [math.log(b) - b_e * math.log(middle_tau), b_e, math.log(q), 0.0]
                starts.append(np.clip(np.array(first), lowest + 1e-12, highest - 1e-12))
    return _best(residuals, starts, lowest, highest), notes


def _best(
    residuals: Callable[[Floats], Floats], starts: Sequence[Floats], lowest: Floats, highest: Floats
) -> OptimizeResult:
    found = [
        least_squares(
            residuals,
            start,
            bounds=(lowest, highest),
            loss="soft_l1",
            f_scale=ROBUST_SCALE,
            max_nfev=200,
        )
        for start in starts
    ]
    return min(found, key=lambda result: float(result.cost))


def _free(curves: Sequence[Curve]) -> Truths:
    """Which of the four parameters the curves determine."""
    ranges = [[_tau_of(curve) for curve in curves], [_tpp_of(curve) for curve in curves]]
    b_e, q_e = (max(values) / min(values) >= LEAST_RANGE for values in ranges)
    return np.array([True, b_e, True, q_e])


def _uncertainty(result: OptimizeResult, free: Truths | None = None) -> tuple[Floats, Floats]:
    """Standard errors and correlations of the parameters.

    What is left of a fit moves slowly along a curve, so its points are no independent
    measurements: they count as 20 per 400.
    """
    jacobian, residuals = result.jac, result.fun
    if free is not None:
        jacobian = jacobian * free
    count = max(residuals.size / 20, jacobian.shape[1] + 1)
    variance = float((residuals**2).mean()) / (1 - jacobian.shape[1] / count)
    information = jacobian.T @ jacobian / residuals.size * count
    covariance = np.linalg.pinv(information) * variance
    errors = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    # A direction without influence has no finite error.
    errors[np.diag(information) < 1e-12] = np.inf
    scale = np.where((errors > 0) & np.isfinite(errors), errors, 1.0)
    return errors, covariance / np.outer(scale, scale)


def _family(parameters: Floats) -> FamilyForm:
    log_b, b_e, log_q, q_e = (float(each) for each in parameters)
    return FamilyForm(b_c=math.exp(log_b), b_e=b_e, q_c=math.exp(log_q), q_e=q_e)


def _error_of(curve: Curve, family: FamilyForm) -> float:
    t, values = _grid(curve)
    fitted = family.curve(_tau_of(curve), _tpp_of(curve)).at(t, _schedule_of(curve))
    return float(np.abs(fitted - values).mean())


def _grid(curve: Curve) -> tuple[Floats, Floats]:
    start, end = curve.span
    start = max(start, IGNORED)
    if not curve.t.size or int((curve.t >= start).sum()) < 5 or end - start < 0.1:
        raise UsageError(f"{curve.source}: has too few points at t >= {IGNORED} to fit")
    t = np.linspace(start, end, GRID_POINTS)
    return t, curve.at(t)


def _schedule_of(curve: Curve) -> Schedule:
    if curve.controls.schedule is None:
        raise UsageError(f"{curve.source}: its learning-rate schedule is not known: --schedule")
    return curve.controls.schedule


def _tau_of(curve: Curve) -> float:
    tau = curve.controls.tau
    if tau is None or not math.isfinite(tau):
        raise UsageError(
            f"{curve.source}: tau is not known: give --tau, or --lr, --weight-decay and "
            "--batch-tokens"
        )
    return tau


def _tpp_of(curve: Curve) -> float:
    if curve.controls.tpp is None:
        raise UsageError(
            f"{curve.source}: tokens per parameter are not known: give --tpp, or --params and "
            "--batch-tokens"
        )
    return curve.controls.tpp
