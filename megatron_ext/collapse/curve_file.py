"""Curve files: JSON with a version, where the curve came from, settings, points or parameters."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.controls import Controls
from megatron_ext.collapse.curve import SMOOTH_STEPS, Curve
from megatron_ext.collapse.form import Form
from megatron_ext.collapse.schedule import NamedSchedule, SampledSchedule, Schedule
from megatron_ext.errors import UsageError

FORMAT = "megatron_ext collapse curve"
VERSION = 1
MOST_BYTES = 64 << 20
"""A larger file is no curve file."""


def write_curve(curve: Curve, path: Path, force: bool = False) -> None:
    """Write a curve file.

    Raises:
        UsageError: The file exists and `force` is not set, or it cannot be written.
    """
    write_text(path, json.dumps(curve_to_json(curve), indent=1) + "\n", force)


def write_text(path: Path, text: str | bytes, force: bool) -> None:
    """Write a file whole or not at all.

    Raises:
        UsageError: The file exists and `force` is not set, or it cannot be written.
    """
    if path.exists() and not force:
        raise UsageError(f"{path}: exists; give another name, or --force to replace it")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(text.encode() if isinstance(text, str) else text)
        partial.replace(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be written: {error}") from None


def curve_to_json(curve: Curve) -> dict[str, Any]:
    """The curve as JSON's own types."""
    controls = {name: value for name, value in vars(curve.controls).items() if value is not None}
    if curve.controls.schedule is not None:
        controls["schedule"] = _schedule_to_json(curve.controls.schedule)
    for name, value in controls.items():
        if value == math.inf:  # tau without weight decay
            controls[name] = "inf"
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": curve.source,
        "split": curve.split,
        "final_loss": curve.final_loss,
        "final_loss_error": curve.final_loss_error,
        "settings": {"smooth_steps": curve.smooth_steps},
        "controls": controls,
        "form": None if curve.form is None else vars(curve.form),
        "t": curve.t.tolist(),
        "l": curve.l.tolist(),
        "notes": list(curve.notes),
    }


def is_curve_file(path: Path) -> bool:
    """Whether a file is JSON that calls itself a curve file."""
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        return False
    with path.open("rb") as file:
        return FORMAT.encode() in file.read(4096)


def read_curve(path: Path) -> Curve:
    """Read a curve file.

    Raises:
        UsageError: It is none, is of a newer version, or a field is missing or wrong.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: is larger than any curve file")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no curve file: {error}") from None
    return curve_from_json(fields, str(path))


def curve_from_json(fields: Any, name: str) -> Curve:
    """The curve that `curve_to_json` described.

    Args:
        fields: the parsed JSON.
        name: the file, for messages.

    Raises:
        UsageError: A field is missing or wrong, or the version is newer.
    """
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise UsageError(f"{name}: is no curve file: 'format' is not {FORMAT!r}")
    version = fields.get("version")
    if not isinstance(version, int) or version < 1:
        raise UsageError(f"{name}: 'version' is {version!r}, no number of at least 1")
    if version > VERSION:
        raise UsageError(
            f"{name}: is of version {version}, this megatron_ext reads up to {VERSION}: update it"
        )
    t, values = _numbers(fields, "t", name), _numbers(fields, "l", name)
    if t.size != values.size:
        raise UsageError(f"{name}: 't' has {t.size} numbers, 'l' has {values.size}")
    if t.size and not ((np.diff(t) > 0).all() and t[0] >= 0 and t[-1] <= 1.001):
        raise UsageError(f"{name}: 't' does not increase within 0-1")
    if t.size and not (values > 0).all():
        raise UsageError(f"{name}: 'l' is not positive throughout")
    split = fields.get("split", "train")
    if split not in ("train", "validation"):
        raise UsageError(f"{name}: 'split' is {split!r}, neither 'train' nor 'validation'")
    settings = fields.get("settings") or {}
    form_fields = fields.get("form")
    form = None
    if form_fields is not None:
        form = Form(**{key: _number(form_fields, key, name) for key in ("b", "q", "m", "e1", "e2")})
    controls = _controls(fields.get("controls") or {}, name)
    if not t.size and (form is None or controls.schedule is None):
        raise UsageError(f"{name}: has neither points nor a form with its schedule")
    if t.size == 1:
        raise UsageError(f"{name}: has a single point")
    final = fields.get("final_loss")
    notes = fields.get("notes") or []
    return Curve(
        source=str(fields.get("source", name)),
        split=split,
        controls=controls,
        final_loss=None if final is None else _number(fields, "final_loss", name),
        final_loss_error=_number(fields, "final_loss_error", name, 0.0),
        smooth_steps=_number(settings, "smooth_steps", name, SMOOTH_STEPS),
        t=t,
        l=values,
        form=form,
        notes=tuple(str(note) for note in notes) if isinstance(notes, list) else (),
    )


def _schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    if isinstance(schedule, NamedSchedule):
        return dict(vars(schedule))
    return {"t": list(schedule.t), "eta": list(schedule.eta)}


def _controls(fields: Any, name: str) -> Controls:
    if not isinstance(fields, dict):
        raise UsageError(f"{name}: 'controls' is no object")
    known: dict[str, Any] = {
        key: math.inf if fields[key] == "inf" else _number(fields, key, name)
        for key in Controls.__dataclass_fields__
        if key != "schedule" and fields.get(key) is not None
    }
    schedule = fields.get("schedule")
    if schedule is None:
        return Controls(**known)
    if not isinstance(schedule, dict):
        raise UsageError(f"{name}: 'schedule' is no object")
    if "style" in schedule:
        numbers = {key: _number(schedule, key, name) for key in ("warmup", "floor", "decay")}
        return Controls(**known, schedule=NamedSchedule(str(schedule["style"]), **numbers))
    t, eta = _numbers(schedule, "t", name), _numbers(schedule, "eta", name)
    if t.size != eta.size or t.size < 2 or not (np.diff(t) > 0).all():
        raise UsageError(f"{name}: the schedule's 't' and 'eta' do not fit together")
    return Controls(**known, schedule=SampledSchedule(tuple(t.tolist()), tuple(eta.tolist())))


def _number(fields: Any, key: str, name: str, default: float | None = None) -> float:
    value = fields.get(key, default) if isinstance(fields, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
        raise UsageError(f"{name}: {key!r} is {value!r}, no finite number")
    return float(value)


def _numbers(fields: Mapping[str, Any], key: str, name: str) -> Floats:
    values = fields.get(key)
    if not isinstance(values, list):
        raise UsageError(f"{name}: {key!r} is no list")
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise UsageError(f"{name}: {key!r}[{place}] is {value!r}, no finite number")
    return np.array(values, dtype=np.float64)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
