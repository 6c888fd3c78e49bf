"""Whether a reference may be used for a run: same schedule, TPP and tau, and it collapses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.collapse.align import Alignment
from megatron_ext.collapse.controls import Controls
from megatron_ext.collapse.curve import IGNORED, Curve, NormalisedLoss
from megatron_ext.collapse.noise import long_run_noise
from megatron_ext.collapse.observations import Observation


@dataclass(frozen=True)
class Tolerances:
    """How far controls may be apart.

    Attributes:
        schedule: mean difference of the learning rates over their peaks, for t >= 0.2.
        tpp: relative difference of tokens per parameter, beyond what rounded sizes explain.
        tau: relative difference of tau.
        steepness: how much steeper or flatter the run may be than the reference. Healthy public
            families stay below 0.1; runs whose TPP differ by 4 lie at 0.2.
    """

    schedule: float = 0.03
    tpp: float = 0.15
    tau: float = 0.25
    steepness: float = 0.15


@dataclass(frozen=True)
class Comparison:
    """Whether two runs' controls match.

    Attributes:
        reasons: why not, one line per control; empty if they match.
        unknown: what could not be compared, one line each.
    """

    reasons: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def compare_controls(
    run: Controls, reference: Controls, tolerances: Tolerances | None = None
) -> Comparison:
    """Compare the controls of a run with those of a reference."""
    allowed = tolerances or Tolerances()
    reasons: list[str] = []
    unknown: list[str] = []
    for found in (
        _compare_schedules(run, reference, allowed.schedule),
        _compare_tpp(run, reference, allowed.tpp),
        _compare_tau(run, reference, allowed.tau),
    ):
        text, is_reason = found
        if text:
            (reasons if is_reason else unknown).append(text)
    return Comparison(tuple(reasons), tuple(unknown))


def steepness(
    observations: Sequence[Observation], reference: NormalisedLoss, start: float
) -> tuple[float, float] | None:
    """How much steeper than the reference a run is, and the standard error of that.

    Args:
        observations: of the run; those before `start` are left out.
        reference: normalised loss.
        start: fraction of training.

    Returns:
        None where fewer than eight observations are left, or they span less than a fifth.
    """
    seen = [each for each in observations if each.t >= start]
    if len(seen) < 8 or seen[-1].t - seen[0].t < 0.2:
        return None
    references = [float(reference.at(np.array([each.t]))[0]) for each in seen]
    # What scatters counts as noise; a curve that is only scatter has no steepness.
    level = seen[-1].loss
    residuals = [each.loss / level - r for each, r in zip(seen, references, strict=True)]
    noise = long_run_noise(np.array(residuals))
    wide = Alignment(steepness=1.0)
    last = start
    for each, at in zip(seen, references, strict=True):
        weight = min(max((each.t - last) * 100, 1e-3), 2.0)
        wide.update(each.loss, at, weight, noise)
        last = each.t
    return wide.steepness


def not_collapsing(found: tuple[float, float] | None, allowed: float) -> str | None:
    """Why a run does not collapse onto a reference, or None.

    Args:
        found: `steepness` of the run and its standard error.
        allowed: tolerance.
    """
    if found is None or abs(found[0]) - 2 * found[1] <= allowed:
        return None
    word = "steeper" if found[0] > 0 else "flatter"
    return (
        f"does not collapse: the run is {abs(found[0]):.0%} {word} than the reference, "
        f"allowed are {allowed:.0%}"
    )


def reference_notes(run_split: str, reference: Curve) -> tuple[str, ...]:
    """What to say of a reference before it is used."""
    notes = []
    if run_split != reference.split:
        notes.append(f"the run's losses are of {run_split}, the reference's of {reference.split}")
    start, end = reference.span
    if start > IGNORED or end < 0.985:
        notes.append(f"the reference covers t = {start:.2f} to {end:.2f} only")
    if reference.final_loss_error > 0.003:
        advice = "; smooth over more steps with --smooth" if reference.split == "train" else ""
        notes.append(
            f"the reference's final loss is uncertain by {reference.final_loss_error:.1%}: "
            f"its losses are noisy{advice}"
        )
    return tuple(notes)


def _compare_schedules(run: Controls, reference: Controls, allowed: float) -> tuple[str, bool]:
    ours, theirs = run.schedule, reference.schedule
    if ours is None or theirs is None:
        return _missing("schedule", ours is None, theirs is None)
    start = max(ours.span[0], theirs.span[0], IGNORED)
    end = min(ours.span[1], theirs.span[1])
    if end - start < 0.1:
        return "schedule: not known over the same part of training: not compared", False
    t = np.linspace(start, end, 200)
    apart = np.abs(ours.at(t) - theirs.at(t))
    if float(apart.mean()) <= allowed:
        return "", False
    worst = float(t[int(np.argmax(apart))])
    return (
        f"schedule: learning rates over their peaks differ by {apart.mean():.3f} on average, "
        f"most at t = {worst:.2f}; allowed are {allowed}",
        True,
    )


def _compare_tpp(run: Controls, reference: Controls, allowed: float) -> tuple[str, bool]:
    ours, theirs = run.tpp, reference.tpp
    assumed = ""
    if ours is None or theirs is None:
        # Runs of one family usually share the batch; then steps stand for tokens.
        if not (run.params and reference.params and run.steps and reference.steps):
            return _missing("TPP", ours is None, theirs is None)
        ours, theirs = run.steps / run.params, reference.steps / reference.params
        assumed = " (tokens are not known; if the batches are the same)"
    rounding = (1 + run.params_error) * (1 + reference.params_error)
    ratio = ours / theirs
    if abs(math.log(ratio)) <= math.log(1 + allowed) + math.log(rounding):
        return (
            ("TPP: tokens are not known; compared as if batches were the same", False)
            if (assumed)
            else ("", False)
        )
    times = max(ratio, 1 / ratio)
    values = "" if assumed else f": {ours:.3g} against {theirs:.3g}"
    return f"TPP differs {times:.2f} times{values}{assumed}; allowed is {1 + allowed:.2f}", True


def _compare_tau(run: Controls, reference: Controls, allowed: float) -> tuple[str, bool]:
    ours, theirs, note = run.tau, reference.tau, ""
    if ours is None or theirs is None:
        no_decay = run.weight_decay is None and reference.weight_decay is None
        if not no_decay or run.tau_lambda is None or reference.tau_lambda is None:
            return _missing("tau", ours is None, theirs is None)
        ours, theirs = run.tau_lambda, reference.tau_lambda
        note = "tau: weight decay is not known; compared as if it were the same"
    if math.isinf(ours) and math.isinf(theirs):
        return note, False
    if math.isinf(ours) or math.isinf(theirs):
        return f"tau differs: {ours:.3g} against {theirs:.3g}", True
    ratio = ours / theirs
    if abs(math.log(ratio)) <= math.log(1 + allowed):
        return note, False
    times = max(ratio, 1 / ratio)
    values = f": {ours:.3g} against {theirs:.3g}" if not note else " at the same weight decay"
    return f"tau differs {times:.2f} times{values}; allowed is {1 + allowed:.2f}", True


def _missing(control: str, ours: bool, theirs: bool) -> tuple[str, bool]:
    whose = (
        "the run and the reference" if ours and theirs else "the run" if ours else ("the reference")
    )
    return f"{control}: not known of {whose}: not compared", False
