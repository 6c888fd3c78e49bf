"""Sections of a report that come from logs and flags: loss, collapse, settings, what-if."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import numpy as np

from megatron_ext.collapse.check import describe
from megatron_ext.collapse.curve import IGNORED, thin
from megatron_ext.report.blocks import (
    Block,
    Code,
    Note,
    Paragraph,
    Picture,
    Section,
    Table,
    duration,
    number,
    percent,
)
from megatron_ext.report.run import Run
from megatron_ext.report.svg import Curve, line_chart

_MOST_POINTS = 1500
_LETTERS = ("a", "b")
_SHOWN = 12
_SCHEDULE = "--pipeline-schedule rrfp"


def loss_section(runs: Sequence[Run]) -> Section:
    """The loss over the steps."""
    section = Section("loss", "Loss")
    curves, rows, keys = [], [], []
    for letter, run in zip(_LETTERS, runs, strict=False):
        if run.losses is None:
            continue
        history = run.losses
        steps, losses = thin(history.steps, history.losses, _MOST_POINTS)
        curves.append(Curve(letter, steps.tolist(), losses.tolist()))
        keys.append((f"k-{letter}", run.name))
        lowest = int(np.argmin(history.losses))
        rows.append(
            [
                run.name,
                number(float(history.losses[0]), 4),
                number(float(history.losses[-1]), 4),
                f"{history.losses[lowest]:.4f} at {history.steps[lowest]:.0f}",
                f"{history.steps[0]:.0f} to {history.steps[-1]:.0f}",
                history.split,
                PurePath(history.source).name,
            ]
        )
    if not curves:
        return section
    caption = "Loss in nats per token over the steps: " + ", ".join(row[0] for row in rows) + "."
    section.blocks = [
        Picture(line_chart(curves, caption, "step", "loss"), caption, keys),
        Table(
            "Losses",
            ["run", "first", "last", "lowest", "steps", "of", "read from"],
            rows,
            is_text=True,
        ),
    ]
    for run in runs:
        if run.losses is not None:
            section.blocks += [Note(f"{run.name}: {note}") for note in run.losses.notes]
            section.blocks += [
                Note(f"{run.name}: the loss was no positive number at step {step:.0f}", "alarm")
                for step in run.losses.bad_steps[:5]
            ]
    return section


def collapse_section(runs: Sequence[Run]) -> Section:
    """The normalised loss against a reference, with alarms."""
    section = Section("collapse", "Collapse")
    compared = [
        (letter, run) for letter, run in zip(_LETTERS, runs, strict=False) if run.check is not None
    ]
    if not compared:
        return section
    curves: list[Curve] = []
    residuals: list[Curve] = []
    keys: list[tuple[str, str]] = []
    for _, run in compared:
        reference = run.reference
        if all(curve.name != "reference" for curve in curves):
            first, last = reference.span
            t = np.linspace(first, last, 400)
            curves.append(Curve("reference", t.tolist(), reference.at(t).tolist()))
            keys.append(("k-reference", f"reference {PurePath(reference.source).name}"))
    for letter, run in compared:
        picture = run.collapse
        assert picture is not None
        marks = [alarm.t for alarm in picture.alarms]
        curves.append(Curve(letter, picture.t.tolist(), picture.l.tolist(), marks))
        late = picture.t >= IGNORED
        residuals.append(
            Curve(letter, picture.t[late].tolist(), picture.residual[late].tolist(), marks)
        )
        keys.append((f"k-{letter}", run.name))
    if any(curve.marks for curve in curves):
        keys.append(("k-alarm", "alarm"))
    late_values = [
        y
        for curve in curves
        for x, y in zip(curve.xs, curve.ys, strict=True)
        if x >= IGNORED and np.isfinite(y)
    ]
    y_range = (min(late_values), max(late_values)) if late_values else None
    caption = "Loss divided by its final value, over the fraction of training."
    left_over = "What is left of it over the reference."
    chart = line_chart(
        curves, caption, "fraction of training", "loss / final loss", y_range=y_range
    )
    section.blocks.append(Picture(chart, caption, keys))
    if any(len(curve.xs) for curve in residuals):
        chart = line_chart(residuals, left_over, "fraction of training", "residual", height=180)
        section.blocks.append(Picture(chart, left_over))
    for _, run in compared:
        assert run.check is not None
        section.blocks += _check_blocks(run)
    return section


def _check_blocks(run: Run) -> list[Block]:
    result = run.check
    assert result is not None
    blocks: list[Block] = []
    if result.alarms:
        rows = [
            [
                str(alarm.step),
                alarm.kind,
                percent(alarm.size, 2) if np.isfinite(alarm.size) else "no number",
                number(alarm.confidence, 4),
                str(alarm.started_step),
                "; ".join(alarm.nearby) or number(None),
            ]
            for alarm in result.alarms
        ]
        blocks += [
            Note(f"{run.name}: {len(rows)} alarm{'s' * (len(rows) > 1)}.", "alarm"),
            Table(
                f"{run.name}: alarms",
                ["step", "kind", "size", "confidence", "began near step", "near it"],
                rows,
                is_text=True,
            ),
        ]
    if not result.comparable:
        blocks.append(
            Note(
                f"{run.name}: not comparable with this reference, shown all the same. Its alarms "
                "and predictions mean little: " + "; ".join(result.reasons)
            )
        )
    blocks.append(
        Code("\n".join(describe(result, force=True)), f"{run.name} against its reference")
    )
    return blocks


def what_if_section(runs: Sequence[Run]) -> Section:
    """What the simulator would change."""
    section = Section("what-if", "What other settings would give")
    for run in runs:
        found = run.what_if
        if found is None:
            continue
        if found.skipped:
            section.blocks.append(Note(f"{run.name}: not simulated: {found.skipped}"))
            continue
        section.blocks.append(
            Paragraph(
                f"{run.name} ran {found.ran}. The simulation predicts its {found.iterations} "
                f"traced iterations with an error of {percent(found.error)} (median); measured "
                f"were {duration(found.measured)} per iteration. Where that error is large, do not "
                "trust the rest."
            )
        )
        mine = next(one for one in found.found if str(one.policy) == found.ran)
        rows: list[list[str]] = []
        marked: set[int] = set()
        for place, one in enumerate(found.found):
            if place >= _SHOWN and one is not mine:
                continue
            if one is mine:
                marked.add(len(rows))
            rows.append(
                [
                    f"{one.policy}{' (this run)' if one is mine else ''}",
                    duration(one.summary.makespan / found.per_run),
                    f"{mine.summary.makespan / one.summary.makespan:.3f}x",
                    percent(one.summary.floor_ratio),
                    number(one.summary.peak_live, 0),
                    one.flags.removeprefix(f"{_SCHEDULE} "),
                ]
            )
        section.blocks.append(
            Table(
                f"{run.name}: simulated from its own task and message times",
                [
                    "policy",
                    "per iteration",
                    "against this run",
                    "of the floor",
                    "peak held",
                    f"flags besides {_SCHEDULE}",
                ],
                rows,
                marked=frozenset(marked),
                is_text=True,
                keeps_lines=True,
            )
        )
        best = found.found[0]
        gain = mine.summary.makespan / best.summary.makespan
        if best is mine or gain < 1.02:
            text = f"{run.name}: nothing in this list gains more than 2 %."
        else:
            text = (
                f"{run.name}: {best.policy} would be {gain:.2f} times as fast. Flags: {best.flags}"
            )
            if best.policy.pipedream_2bw and not mine.policy.pipedream_2bw:
                text += " (with --pipedream-2bw gradients are one step old)"
        section.blocks.append(Note(text))
    if section.blocks:
        section.blocks.append(
            Paragraph(
                "The floor is the busiest stage's own work; no schedule beats it. For other batch "
                "sizes, splits of layers and transports: megatron-ext simulate --from-trace DIR."
            )
        )
    return section


def settings_section(runs: Sequence[Run]) -> Section:
    """What the run was started with."""
    section = Section("settings", "Settings and flags")
    known = [run for run in runs if run.settings or run.command]
    if not known:
        return section
    tables = [
        (
            "Settings",
            [{k: str(v) for k, v in run.settings.items() if v is not None} for run in known],
        ),
        ("Flags", [_flags(run.command) for run in known]),
    ]
    for caption, values in tables:
        names = list(dict.fromkeys(name for each in values for name in each))
        rows = [[name, *(each.get(name, "–") for each in values)] for name in names]  # noqa: RUF001
        different = frozenset(i for i, row in enumerate(rows) if len(set(row[1:])) > 1)
        if len(known) > 1:
            caption += ", those that differ marked"
        if rows:
            section.blocks.append(
                Table(
                    caption,
                    ["name", *(run.name for run in known)],
                    rows,
                    marked=different,
                    is_text=True,
                    folded=caption.startswith("Flags"),
                )
            )
    for run in known:
        if run.command:
            section.blocks.append(Code(" ".join(run.command), f"Command of {run.name}"))
    return section


def _flags(command: Sequence[str]) -> dict[str, str]:
    """Flags and their values; what stands before the first one is the script."""
    flags: dict[str, str] = {}
    name = "script"
    for word in command:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags[name] = value if equals else ""
        else:
            flags[name] = f"{flags.get(name, '')} {word}".strip()
    return {name: value or "on" for name, value in flags.items()}
