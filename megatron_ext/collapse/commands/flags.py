"""Flags that several subcommands share, and what they mean."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from megatron_ext.collapse.check import CheckConfig
from megatron_ext.collapse.comparable import Tolerances
from megatron_ext.collapse.controls import Controls, controls_of, parse_size, positive
from megatron_ext.collapse.curve import SMOOTH_STEPS, Curve, make_curve
from megatron_ext.collapse.curve_file import is_curve_file, read_curve
from megatron_ext.collapse.history import History
from megatron_ext.collapse.monitor import MonitorConfig
from megatron_ext.collapse.power_law import fit_power_law
from megatron_ext.collapse.schedule import parse_schedule
from megatron_ext.collapse.sources import SourceOptions, read_histories, read_history
from megatron_ext.collapse.sources.options import parse_where
from megatron_ext.errors import UsageError

SOURCES = (
    "CSV, JSON lines, Megatron's console log, a TensorBoard directory, a wandb run directory, "
    "wandb:ENTITY/PROJECT/RUN or a curve file"
)


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Which losses to read from a source."""
    group = parser.add_argument_group("which losses")
    group.add_argument("--column", help="column, tag or metric of the loss (default: guessed)")
    group.add_argument(
        "--where", metavar="NAME=VALUE,...", help="pick one run out of a file that holds several"
    )
    group.add_argument("--axis", help="column of steps or tokens (default: guessed)")
    group.add_argument(
        "--total-steps",
        type=float,
        metavar="N",
        help="last step planned, where the source does not say and the run is not finished",
    )
    group.add_argument(
        "--smooth",
        type=float,
        metavar="STEPS",
        help=f"width of the moving average in steps (default: {SMOOTH_STEPS:.0f})",
    )
    group.add_argument(
        "--smooth-sequences",
        type=float,
        metavar="N",
        help="the same in sequences, divided by the batch; the paper fits with 12288",
    )


def add_control_flags(parser: argparse.ArgumentParser) -> None:
    """What decides a curve's shape, where the source does not say."""
    group = parser.add_argument_group("controls that the source does not say")
    group.add_argument("--params", metavar="N", help="number of parameters, such as 124M")
    group.add_argument("--batch-tokens", type=float, metavar="N", help="batch in tokens")
    group.add_argument("--lr", type=float, metavar="RATE", help="peak learning rate")
    group.add_argument("--weight-decay", type=float, metavar="RATE", help="of AdamW")
    group.add_argument("--tpp", type=float, metavar="N", help="tokens per parameter")
    group.add_argument("--tau", type=float, metavar="TAU", help="B / (lr weight_decay D)")
    group.add_argument(
        "--schedule",
        metavar="STYLE[:FLOOR[:DECAY]]",
        help="linear, cosine, constant, inverse-square-root or wsd; FLOOR is the last rate over "
        "the peak, DECAY the part in which wsd decays",
    )
    group.add_argument(
        "--warmup",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="part of training with a rising rate, for --schedule",
    )


def add_reference_flags(parser: argparse.ArgumentParser, also_forced: str = "") -> None:
    """What to compare with, and how.

    Args:
        parser: the subcommand's.
        also_forced: what its --force does besides.
    """
    parser.add_argument(
        "--reference",
        nargs="+",
        required=True,
        metavar="REF",
        help=f"finished run to compare with: {SOURCES}; of several the first that is comparable",
    )
    parser.add_argument("--reference-column", help="--column of the references, if another")
    parser.add_argument(
        "--reference-where",
        metavar="NAME=VALUE,...",
        help="pick one reference out of a file that holds several (default: every run in it that "
        "meets --where as far as any does, the smallest first)",
    )
    group = parser.add_argument_group("the comparison")
    group.add_argument(
        "--until",
        type=float,
        metavar="FRACTION",
        help="pretend that what comes after this fraction of the run is not there yet",
    )
    group.add_argument(
        "--window",
        metavar="START-END",
        default="0.25-0.5",
        help="part of training to align on; it grows as the run goes on (default: %(default)s)",
    )
    group.add_argument(
        "--false-alarm-rate",
        type=float,
        metavar="RATE",
        default=MonitorConfig.false_alarm_rate,
        help="accepted chance of a false alarm per healthy run (default: %(default)s)",
    )
    group.add_argument(
        "--expected-final-loss",
        metavar="LOSS",
        help="align to this instead; 'power-law' takes it from the references' sizes and losses",
    )
    forced = "compare although the controls differ"
    if also_forced:
        forced += f", and {also_forced}"
    group.add_argument("--force", action="store_true", help=forced)


def source_options(args: argparse.Namespace) -> SourceOptions:
    """The run's `SourceOptions`."""
    return SourceOptions(
        column=args.column,
        where=parse_where(args.where),
        axis=args.axis,
        end_step=positive(args.total_steps, "--total-steps"),
    )


def given_controls(args: argparse.Namespace) -> Controls:
    """The controls that the flags state.

    Raises:
        UsageError: A flag's value cannot be.
    """
    params, error = None, 0.0
    if args.params is not None:
        size = parse_size(args.params)
        if size is None:
            raise UsageError(f"--params {args.params!r} is no number such as 124M or 1.3B")
        # What the user types is meant as it stands.
        params, error = size[0], 0.0
    if args.weight_decay is not None and not 0 <= args.weight_decay < math.inf:
        raise UsageError(f"--weight-decay {args.weight_decay} is not at least 0")
    schedule = None
    if args.schedule is not None:
        if not 0 <= args.warmup < 1:
            raise UsageError(f"--warmup {args.warmup} is no fraction of training")
        schedule = parse_schedule(args.schedule, warmup=args.warmup)
    return Controls(
        params=params,
        params_error=error,
        batch_tokens=positive(args.batch_tokens, "--batch-tokens"),
        lr_peak=positive(args.lr, "--lr"),
        weight_decay=args.weight_decay,
        schedule=schedule,
        given_tpp=positive(args.tpp, "--tpp"),
        given_tau=positive(args.tau, "--tau"),
    )


def with_derived(given: Controls, history: History) -> Controls:
    """Controls with the training length that a stated batch implies for a run."""
    known, _ = controls_of(history)
    if known.tokens is not None or given.batch_tokens is None:
        return given
    return Controls(**{**vars(given), "tokens": given.batch_tokens * history.end})


def smooth_steps(args: argparse.Namespace, history: History) -> float:
    """Width of the moving average in steps.

    Raises:
        UsageError: It is given twice, or in sequences although the batch is not known.
    """
    if args.smooth is not None and args.smooth_sequences is not None:
        raise UsageError("--smooth and --smooth-sequences: give one of them")
    if args.smooth_sequences is None:
        return positive(args.smooth, "--smooth") or SMOOTH_STEPS
    sequences = positive(args.smooth_sequences, "--smooth-sequences")
    for name in ("global_batch_size", "batch_sequences"):
        batch = parse_size(history.metadata.get(name, ""))
        if batch is not None and sequences is not None:
            return sequences / batch[0]
    raise UsageError(
        f"{history.source}: --smooth-sequences needs its batch in sequences, which it does not "
        "say: use --smooth"
    )


def read_run(name: str, args: argparse.Namespace) -> History:
    """A run as the flags pick it, cut off at --until.

    Raises:
        UsageError: It cannot be read, or is a curve without a loss.
    """
    path = Path(name)
    if is_curve_file(path):
        if args.column or args.where:
            raise UsageError(f"{name}: is a curve file, --column and --where do not apply")
        history = history_of(read_curve(path))
    else:
        history = read_history(name, source_options(args))
    until = getattr(args, "until", None)
    if until is None:
        return history
    if not 0 < until <= 1:
        raise UsageError(f"--until {until} is not in 0-1")
    return history.until(until)


def history_of(curve: Curve) -> History:
    """The points of a curve file as a finished run's history, in millionths of training.

    Raises:
        UsageError: The curve has no points or no final loss.
    """
    if not curve.t.size or curve.final_loss is None:
        raise UsageError(f"{curve.source}: a run needs points and a final loss, this curve has not")
    return History(
        source=curve.source,
        steps=curve.t * 1e6,
        losses=curve.l * curve.final_loss,
        split=curve.split,
        end_step=1e6,
        notes=curve.notes,
    )


def read_references(args: argparse.Namespace) -> list[Curve]:
    """The curves of --reference; of a file that holds several runs all, the smallest first.

    Raises:
        UsageError: One cannot be read, or is no finished run.
    """
    return [curve for name in args.reference for curve in _read_references(name, args)]


def check_config(args: argparse.Namespace, references: list[Curve], run: History) -> CheckConfig:
    """How to check, as the flags say."""
    given = with_derived(given_controls(args), run)
    return CheckConfig(
        monitor=MonitorConfig(
            window=parse_window(args.window, "--window"),
            false_alarm_rate=args.false_alarm_rate,
            expected_final_loss=_expected(args.expected_final_loss, references, run, given),
        ),
        tolerances=Tolerances(),
        force=args.force,
        smooth_steps=smooth_steps(args, run),
        given=given,
    )


def parse_window(text: str, flag: str) -> tuple[float, float]:
    """Read ``0.25-0.5``.

    Raises:
        UsageError: It is none; `flag` is named.
    """
    start, _, end = text.partition("-")
    try:
        return float(start), float(end)
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not START-END, such as 0.25-0.5") from None


def print_json(value: Any) -> None:
    """Print a result for programs; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read_references(name: str, args: argparse.Namespace) -> list[Curve]:
    path = Path(name)
    if is_curve_file(path):
        return [read_curve(path)]
    column = args.reference_column or args.column
    if args.reference_where is not None:
        options = SourceOptions(column, parse_where(args.reference_where), args.axis)
        return [make_curve(read_history(name, options))]
    where = parse_where(args.where)
    histories = read_histories(name, SourceOptions(column, where, args.axis))
    if len(histories) == 1 and where and name == getattr(args, "source", None):
        # The file that the run is in, and the same run: every other one that shares something.
        histories = _others(name, column, where, args)
    curves = [make_curve(each) for each in histories if each.is_complete]
    if not curves:
        raise UsageError(f"{name}: holds no other finished run; pick one with --reference-where")
    return sorted(curves, key=lambda curve: curve.controls.params or math.inf)


def _others(
    name: str, column: str | None, where: dict[str, str], args: argparse.Namespace
) -> list[History]:
    """The runs of a file that differ from `where` in one condition."""
    found: dict[str, History] = {}
    for left_out in where:
        rest = {key: value for key, value in where.items() if key != left_out}
        for history in read_histories(name, SourceOptions(column, rest, args.axis)):
            if any(history.metadata.get(key) != value for key, value in where.items()):
                found[history.source] = history
    return list(found.values())


def _expected(
    text: str | None, references: list[Curve], run: History, given: Controls
) -> float | None:
    if text is None:
        return None
    if text != "power-law":
        try:
            return positive(float(text), "--expected-final-loss")
        except ValueError:
            raise UsageError(
                f"--expected-final-loss {text!r} is neither a number nor 'power-law'"
            ) from None
    size = controls_of(run)[0].with_given(given).params
    points = [
        (each.controls.params, each.final_loss)
        for each in references
        if each.controls.params is not None and each.final_loss is not None
    ]
    if size is None or len(points) < 2:
        raise UsageError(
            "--expected-final-loss power-law needs the run's --params and two or more references "
            "with their sizes and final losses"
        )
    return fit_power_law([n for n, _ in points], [loss for _, loss in points]).at(size)
