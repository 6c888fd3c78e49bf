"""`megatron-ext collapse fit`: curve files from finished runs, and the form fitted to them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_ext.collapse.commands import flags
from megatron_ext.collapse.curve import Curve, make_curve
from megatron_ext.collapse.curve_file import is_curve_file, read_curve, write_curve
from megatron_ext.collapse.fit import CurveFit, FamilyFit, fit_curve, fit_family, with_form
from megatron_ext.collapse.power_law import PowerLaw, fit_power_law
from megatron_ext.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"finished run: {flags.SOURCES}")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write a curve file; of several runs a directory"
    )
    parser.add_argument(
        "--no-held-out", action="store_true", help="skip the fits that leave one curve out"
    )
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    flags.add_source_flags(parser)
    flags.add_control_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Fit, write and print.

    Raises:
        UsageError: A source or flag cannot work, or a file exists.
    """
    curves = [_read(name, args) for name in args.runs]
    fits: list[CurveFit | str] = []
    for place, curve in enumerate(curves):
        try:
            fit = fit_curve(curve)
        except UsageError as error:  # without a schedule a curve still has its points
            fits.append(str(error))
            continue
        fits.append(fit)
        curves[place] = with_form(curve, fit)
    family: FamilyFit | str | None = None
    law: PowerLaw | str | None = None
    if len(curves) > 1:
        try:
            family = fit_family(curves, hold_out=not args.no_held_out)
        except UsageError as error:
            family = str(error)
        sizes = [(c.controls.params, c.final_loss) for c in curves]
        known = [(n, loss) for n, loss in sizes if n is not None and loss is not None]
        try:
            law = fit_power_law([n for n, _ in known], [loss for _, loss in known])
        except UsageError as error:
            law = str(error)
    written = _write(curves, args)
    if args.json:
        flags.print_json(_to_json(curves, fits, family, law, written))
    else:
        print("\n".join(_describe(curves, fits, family, law, written)))
    return 0


def _read(name: str, args: argparse.Namespace) -> Curve:
    path = Path(name)
    if is_curve_file(path):
        return read_curve(path)
    history = flags.read_run(name, args)
    given = flags.with_derived(flags.given_controls(args), history)
    return make_curve(history, given, flags.smooth_steps(args, history))


def _write(curves: list[Curve], args: argparse.Namespace) -> list[str]:
    if args.out is None:
        return []
    if len(curves) == 1:
        write_curve(curves[0], args.out, args.force)
        return [str(args.out)]
    targets = [args.out / f"curve-{place}.json" for place in range(len(curves))]
    there = [str(target) for target in targets if target.exists()]
    if there and not args.force:
        raise UsageError(f"{there[0]}: exists; give another --out, or --force to replace it")
    for curve, target in zip(curves, targets, strict=True):
        write_curve(curve, target, args.force)
    return [str(target) for target in targets]


def _to_json(
    curves: list[Curve],
    fits: list[CurveFit | str],
    family: FamilyFit | str | None,
    law: PowerLaw | str | None,
    written: list[str],
) -> dict[str, Any]:
    return {
        "curves": [
            {
                "source": curve.source,
                "split": curve.split,
                "final_loss": curve.final_loss,
                "final_loss_error": curve.final_loss_error,
                "tpp": curve.controls.tpp,
                "tau": curve.controls.tau,
                "points": int(curve.t.size),
                "notes": list(curve.notes),
                **(
                    {"reason": fit}
                    if isinstance(fit, str)
                    else {
                        "b": fit.form.b,
                        "q": fit.form.q,
                        "error": fit.error,
                        "b_error": fit.b_error,
                        "q_error": fit.q_error,
                        "correlation": fit.correlation,
                        "b_and_q_indistinct": fit.indistinct,
                    }
                ),
            }
            for curve, fit in zip(curves, fits, strict=True)
        ],
        "family": {"reason": family}
        if isinstance(family, str)
        else None
        if family is None
        else {
            **vars(family.form),
            "errors": list(family.errors),
            "held_out_errors": list(family.held_out),
            "parameter_errors": list(family.parameter_errors),
            "notes": list(family.notes),
        },
        "power_law": {"reason": law}
        if isinstance(law, str)
        else None
        if law is None
        else vars(law),
        "written": written,
    }


def _describe(
    curves: list[Curve],
    fits: list[CurveFit | str],
    family: FamilyFit | str | None,
    law: PowerLaw | str | None,
    written: list[str],
) -> list[str]:
    lines: list[str] = []
    for curve, fit in zip(curves, fits, strict=True):
        final = "" if curve.final_loss is None else f", final loss {curve.final_loss:.4f}"
        lines.append(f"{curve.source}: {curve.t.size} points{final}")
        controls = (("TPP", curve.controls.tpp), ("tau", curve.controls.tau))
        known = [f"{name} {value:.4g}" for name, value in controls if value is not None]
        if known:
            lines.append(f"  {', '.join(known)}")
        if isinstance(fit, str):
            lines.append(f"  not fitted: {fit}")
        else:
            lines.append(
                f"  b {fit.form.b:.4g} (+-{fit.b_error:.0%}), q {fit.form.q:.4g} "
                f"(+-{fit.q_error:.0%}), mean error {fit.error:.3%} for t >= 0.2"
            )
            if fit.indistinct:
                lines.append(
                    f"  b and q cannot be told apart (correlation {fit.correlation:.2f}): other "
                    "pairs fit as well"
                )
        lines += [f"  note: {note}" for note in curve.notes]
    if isinstance(family, str):
        lines.append(f"no joint fit: {family}")
    elif family is not None:
        form = family.form
        lines.append(
            f"joint fit: b = {form.b_c:.4g} tau^{form.b_e:.3f}, q = {form.q_c:.4g} "
            f"TPP^{form.q_e:.3f}"
        )
        for curve, error, held_out in zip(curves, family.errors, family.held_out, strict=True):
            left = "" if held_out is None else f", {held_out:.3%} fitted without it"
            lines.append(f"  {curve.source}: mean error {error:.3%}{left}")
        lines += [f"  note: {note}" for note in family.notes]
    if isinstance(law, PowerLaw):
        lines.append(
            f"final loss = {law.floor:.4g} + {law.scale:.4g} N^-{law.exponent:.4g} over "
            f"{law.points} runs, off by {law.error:.2%}"
        )
    lines += [f"wrote {name}" for name in written]
    return lines
