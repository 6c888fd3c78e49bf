"""Measure the collapse tools on public loss curves: predictions, alarms, fits, speed.

The curves are found through MEGATRON_EXT_CURVES (its default is ../shared/curves beside the
repository). Prints a table and writes every number as JSON. With --cost it measures instead what
the watch costs in a training, for which it needs no curves.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.check import check
from megatron_ext.collapse.controls import Controls
from megatron_ext.collapse.curve import Curve, make_curve
from megatron_ext.collapse.fit import fit_curve, fit_family
from megatron_ext.collapse.history import History
from megatron_ext.collapse.monitor import Monitor, MonitorConfig
from megatron_ext.collapse.observations import observe_all
from megatron_ext.collapse.raw_rules import first_raw_alarm
from megatron_ext.collapse.schedule import parse_schedule
from megatron_ext.collapse.sources import SourceOptions, read_history
from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine

REPOSITORY = Path(__file__).resolve().parent.parent
BUDGETS = ("1xC", "2xC", "5xC", "10xC")
FAULT_AT = 0.6


def step_fault(size: float) -> Callable[[Floats], Floats]:
    """The loss is `size` higher from the fault on."""
    return lambda t: size * (t >= FAULT_AT)


def drift_fault(t: Floats) -> Floats:
    """The loss drifts away linearly, to 1% at the end."""
    return 0.01 * np.clip((t - FAULT_AT) / (1 - FAULT_AT), 0, None)


FAULTS: dict[str, tuple[Callable[[Floats], Floats], float, float]] = {
    "step of 1%": (step_fault(0.01), 0.65, 1.0),
    "drift to 1%": (drift_fault, 0.85, 0.9),
    "step of 0.5%": (step_fault(0.005), 0.75, 0.8),
}
"""Fault, when its alarm is due, and on which part of the runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 2 if the curves are not there."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--points", type=int, default=1_000_000, help="of the speed measurement")
    parser.add_argument(
        "--cost",
        type=int,
        nargs="?",
        const=100_000,
        metavar="STEPS",
        help="measure what the watch costs a training per step, over so many (default: %(const)s)",
    )
    args = parser.parse_args(argv)
    if args.cost is not None:
        cost = measure_cost(args.cost)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(cost, indent=2) + "\n")
        print(
            f"{cost['microseconds_per_step']:.0f} us per step over {cost['steps']} steps, writing "
            f"to TensorBoard every {cost['log_interval']}: less than 0.1% of iterations above "
            f"{cost['iteration_s']:.2f} s"
        )
        return 0
    folder = Path(os.environ.get("MEGATRON_EXT_CURVES", REPOSITORY / "../shared/curves"))
    if not (folder / "olmo_ladder.csv").is_file():
        print(f"bench_collapse: error: no olmo_ladder.csv in {folder}", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    with ProgressLine("bench", 5, "parts") as progress:
        for done, (name, measure) in enumerate(
            {
                "ladder": measure_ladder,
                "not_collapsing": measure_not_collapsing,
                "linear_to_zero": measure_linear_to_zero,
                "joint": measure_joint,
            }.items()
        ):
            progress.update(done, name)
            found[name] = measure(folder)
        progress.update(4, "speed")
        found["speed"] = measure_speed(args.points)
    rows = table(found)
    found["table"] = [
        {"what": what, "target": target, "measured": measured, "met": met}
        for what, target, measured, met in rows
    ]
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    shown = Table("what", "target", "measured", "met")
    for what, target, measured, met in rows:
        shown.add_row(what, target, measured, "yes" if met else "-" if met is None else "NO")
    Console(width=150).print(shown)
    return 0


def ladder(folder: Path) -> Iterator[tuple[str, History, Curve]]:
    """Runs of 370M and 760M, each with the 190M run of its budget as the reference."""
    for column in ("loss_c4", "loss_pile"):
        for budget in BUDGETS:
            histories = {
                size: read_history(
                    str(folder / "olmo_ladder.csv"),
                    SourceOptions(column, {"size": size, "budget": budget}),
                )
                for size in ("190M", "370M", "760M")
            }
            reference = make_curve(histories.pop("190M"))
            for size, history in histories.items():
                yield f"{column.removeprefix('loss_')} {size} {budget}", history, reference


def measure_ladder(folder: Path) -> list[dict[str, Any]]:
    """Deviation, predictions and alarms of every run of the ladder."""
    entries = []
    for name, history, reference in ladder(folder):
        whole = check(history, [reference])
        final = float(history.losses[-1])
        entry: dict[str, Any] = {
            "run": name,
            "comparable": whole.comparable,
            "mean_deviation": whole.mean_deviation,
            "steepness": whole.steepness,
            "healthy_alarms": [alarm.to_json() for alarm in whole.alarms],
            "faults": {},
        }
        for t in (0.3, 0.5):
            part = check(history.until(t), [reference])
            assert part.predicted_final_loss is not None
            assert part.interval is not None
            entry[f"error_at_{t}"] = part.predicted_final_loss / final - 1
            entry[f"inside_at_{t}"] = part.interval[0] <= final <= part.interval[1]
        for fault, (shape, _, _) in FAULTS.items():
            faulty = replace(history, losses=history.losses * (1 + shape(history.fractions)))
            alarms = [alarm for alarm in check(faulty, [reference]).alarms if alarm.t >= FAULT_AT]
            entry["faults"][fault] = {
                "alarm_at": alarms[0].t if alarms else None,
                "size": alarms[0].size if alarms else None,
                "raw_rules": first_raw_alarm(faulty.fractions, faulty.losses),
            }
        entries.append(entry)
    return entries


def measure_not_collapsing(folder: Path) -> list[dict[str, Any]]:
    """25M against 100M at the same length, so that tokens per parameter differ 4 times."""
    entries = []
    for schedule in ("cosine_24000", "cosine_72000", "wsd_20000_24000"):
        small, large = (
            read_history(
                str(folder / "multipowerlaw.csv"),
                SourceOptions(where={"size": size, "schedule": schedule}),
            )
            for size in ("25M", "100M")
        )
        for run, other in ((small, large), (large, small)):
            result = check(run, [make_curve(other)])
            entries.append(
                {
                    "run": run.source,
                    "reference": other.source,
                    "refused": not result.comparable,
                    "reasons": list(result.reasons),
                    "steepness": result.steepness,
                }
            )
    return entries


def measure_cost(steps: int, log_interval: int = 10) -> dict[str, float]:
    """What the watch adds to Megatron's `training_log`, through the hook that a training uses.

    Megatron's own function is replaced by one that does nothing; its arguments, microbatch
    calculator and TensorBoard writer are real, and losses are tensors.
    """
    import torch
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import global_vars, training
    from torch.utils.tensorboard import SummaryWriter

    from megatron_ext.arguments import CollapseConfig
    from megatron_ext.collapse import megatron_loop as loop
    from megatron_ext.collapse.callback import CollapseCallback, Outlets

    @functools.wraps(training.training_log)
    def training_log(*args: Any, **named: Any) -> None:
        """Nothing."""

    t = np.arange(1, steps + 1) / steps
    reference = Curve("reference", final_loss=3.0, t=t[::100], l=1 + 0.2 * (t[::100] ** -0.2 - 1))
    noise = np.random.default_rng(0).normal(0, 0.01, steps)
    losses = torch.tensor(3.1 * (reference.at(t) + noise), dtype=torch.float32)
    init_num_microbatches_calculator(0, None, 8, 1, 1, False)
    with tempfile.TemporaryDirectory() as folder:
        args = argparse.Namespace(
            log_interval=log_interval,
            train_iters=steps,
            train_samples=None,
            consumed_train_samples=0,
        )
        global_vars._GLOBAL_ARGS = args
        global_vars._GLOBAL_TENSORBOARD_WRITER = SummaryWriter(folder)
        loop._loop = loop._Loop(CollapseConfig(references=("reference",)))
        loop._loop.callback = CollapseCallback(
            [reference],
            Controls(),
            MonitorConfig(),
            steps,
            Outlets(loop._write_metrics, print, print, facts=lambda step: step.facts),
        )
        watched = loop.watched_training_log(training_log)
        rest = {"loss_scale": 1.0, "report_memory_flag": False, "skipped_iter": 0}
        rest |= {"params_norm": None, "num_zeros_in_grad": None, "max_attention_logit": None}
        started = time.process_time()
        for i in range(steps):
            args.consumed_train_samples += 8
            watched({"lm loss": losses[i]}, {}, 1e-3, i + 1, grad_norm=1.0, **rest)
        seconds = time.process_time() - started
        assert loop._loop.callback is not None, "the watch turned itself off"
        assert not loop._loop.callback.alarms
        global_vars._GLOBAL_TENSORBOARD_WRITER.close()
    return {
        "steps": steps,
        "log_interval": log_interval,
        "microseconds_per_step": seconds / steps * 1e6,
        "iteration_s": seconds / steps * 1e3,
    }


def linear_curves(folder: Path) -> list[Curve]:
    """The validation curves with linear decay to zero."""
    return [
        make_curve(
            read_history(
                str(folder / "linear_to_zero_124m.csv"),
                SourceOptions(where={"run": run, "split": "val"}),
            )
        )
        for run in ("lr0.0005", "lr0.001", "lr0.002")
    ]


def measure_linear_to_zero(folder: Path) -> list[dict[str, Any]]:
    """The form fitted to every validation curve by itself."""
    entries = []
    for curve in linear_curves(folder):
        fit = fit_curve(curve)
        entries.append(
            {
                "run": curve.source,
                "tau": curve.controls.tau,
                "b": fit.form.b,
                "q": fit.form.q,
                "error": fit.error,
                "indistinct": fit.indistinct,
            }
        )
    return entries


def measure_joint(folder: Path) -> dict[str, Any]:
    """The form fitted jointly, to one schedule and to all curves there are."""
    linear = linear_curves(folder)
    # The ladder's README says what its table does not: weight decay 0.1, cosine to a tenth.
    given = Controls(weight_decay=0.1, schedule=parse_schedule("cosine:0.1"))
    others = [
        make_curve(
            read_history(
                str(folder / "olmo_ladder.csv"),
                SourceOptions("loss_c4", {"size": size, "budget": budget}),
            ),
            given,
        )
        for budget in BUDGETS
        for size in ("190M", "370M", "760M")
    ]
    sets = {"linear_to_zero": linear, "ladder": others, "all": [*linear, *others]}
    found = {}
    for name, curves in sets.items():
        fit = fit_family(curves)
        held_out = [error for error in fit.held_out if error is not None]
        found[name] = {
            **vars(fit.form),
            "curves": len(curves),
            "error": statistics.fmean(fit.errors),
            "worst_error": max(fit.errors),
            "held_out_error": statistics.fmean(held_out),
            "worst_held_out_error": max(held_out),
            "notes": list(fit.notes),
        }
    return found


def measure_speed(points: int) -> dict[str, Any]:
    """Time and memory of `megatron-ext collapse check` on a long CSV, and of the watch's step."""
    t = np.arange(1, points + 1) / points
    losses = 3 * (1 + 0.3 * (t**-0.2 - 1))
    losses *= 1 + np.random.default_rng(0).normal(0, 0.02, points)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "run.csv").open("w") as file:
            file.write("step,loss,lr\n")
            file.writelines(f"{i + 1},{loss:.5f},0.001\n" for i, loss in enumerate(losses))
        words = [sys.executable, "-m", "megatron_ext.cli", "collapse"]
        curve = str(folder / "reference.json")
        run = str(folder / "run.csv")
        subprocess.run([*words, "fit", run, "--out", curve], check=True, capture_output=True)
        used = _child_seconds()
        started = time.perf_counter()
        subprocess.run(
            [*words, "check", run, "--reference", curve, "--json"], check=True, capture_output=True
        )
        seconds = time.perf_counter() - started
        used = _child_seconds() - used
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    monitor = Monitor(_Flat(), MonitorConfig())
    observations = observe_all(t, losses, t * points)
    started = time.perf_counter()
    monitor.observe_all(observations)
    each = (time.perf_counter() - started) / len(observations)
    return {
        "points": points,
        "seconds": seconds,
        "cpu_seconds": used,
        "gigabytes": peak,
        "observation_seconds": each,
        "observations": len(observations),
    }


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class _Flat:
    """The reference of the speed measurement."""

    def at(self, t: Floats) -> Floats:
        return np.asarray(1 + 0.3 * (np.maximum(t, 1e-9) ** -0.2 - 1))


def table(found: dict[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """What was to be reached and what was, row by row."""
    runs = found["ladder"]
    c4 = [run for run in runs if run["run"].startswith("c4")]
    rows: list[tuple[str, str, str, bool | None]] = []
    for name, part in (("C4", c4), ("Pile", [run for run in runs if run not in c4])):
        deviations = [run["mean_deviation"] for run in part]
        shown = f"{min(deviations):.3%} to {max(deviations):.3%}"
        target = "0.04-0.26%" if name == "C4" else "-"
        met = max(deviations) <= 0.0026 if name == "C4" else None
        rows.append((f"mean deviation from 190M, {name}", target, shown, met))
    for t, worst, median in ((0.3, 0.01, None), (0.5, 0.005, 0.0025)):
        errors = [abs(run[f"error_at_{t}"]) for run in runs]
        middle = statistics.median(errors)
        inside = sum(run[f"inside_at_{t}"] for run in runs)
        target = f"<= {worst:.1%}" + ("" if median is None else f", median <= {median:.2%}")
        rows.append(
            (
                f"predicted final loss at t = {t}, {len(runs)} runs",
                target,
                f"<= {max(errors):.2%}, median {middle:.2%}, {inside} in the 95% interval",
                max(errors) <= worst and (median is None or middle <= median),
            )
        )
    false = sum(bool(run["healthy_alarms"]) for run in runs)
    rows.append(("healthy runs with an alarm", "0", f"{false} of {len(runs)}", false == 0))
    for fault, (_, due, part) in FAULTS.items():
        times = [run["faults"][fault]["alarm_at"] for run in runs]
        intime = sum(time is not None and time <= due for time in times)
        target = f"by t = {due} on {part:.0%}"
        met = intime >= part * len(runs)
        rows.append((f"{fault} at t = {FAULT_AT}", target, f"{intime} of {len(runs)}", met))
        for rule in ("six_sigma", "twice_the_mean"):
            raw = [run["faults"][fault]["raw_rules"][rule] for run in runs]
            seen = sum(time is not None for time in raw)
            rows.append((f"  raw loss, {rule}", "-", f"{seen} of {len(runs)} ever", None))
    refused = [entry["refused"] for entry in found["not_collapsing"]]
    rows.append(
        (
            "25M against 100M, TPP differ 4 times",
            "refused",
            f"{sum(refused)} of {len(refused)} refused",
            all(refused),
        )
    )
    errors = [entry["error"] for entry in found["linear_to_zero"]]
    rows.append(
        ("linear to zero, fit per curve", "<= 0.2%", f"<= {max(errors):.3%}", max(errors) <= 0.002)
    )
    for name, joint in found["joint"].items():
        rows.append(
            (
                f"joint fit, {name}, {joint['curves']} curves",
                "reported",
                f"{joint['error']:.3%}, held out {joint['held_out_error']:.3%} (worst "
                f"{joint['worst_held_out_error']:.3%})",
                None,
            )
        )
    speed = found["speed"]
    rows.append(
        (
            f"check of {speed['points']} points",
            "<= 5 s, <= 1 GB",
            f"{speed['seconds']:.1f} s ({speed['cpu_seconds']:.1f} s of CPU), "
            f"{speed['gigabytes']:.2f} GB",
            speed["seconds"] <= 5 and speed["gigabytes"] <= 1,
        )
    )
    return rows


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"bench_collapse: error: {error}", file=sys.stderr)
        sys.exit(2)
