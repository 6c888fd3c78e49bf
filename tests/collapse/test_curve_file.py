"""Curve files: what is written comes back; anything else is a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.collapse.curve_file import (
    VERSION,
    curve_from_json,
    curve_to_json,
    read_curve,
    write_curve,
)
from megatron_ext.collapse.schedule import SampledSchedule
from megatron_ext.errors import UsageError
from tests.collapse import curves
from tests.collapse.curves import check_one_line


def test_round_trip(tmp_path: Path) -> None:
    for schedule in (curves.SCHEDULE, SampledSchedule((0.0, 0.5, 1.0), (0.0, 1.0, 0.1))):
        curve = curves.reference(schedule=schedule)
        write_curve(curve, tmp_path / "curve.json", force=True)
        back = read_curve(tmp_path / "curve.json")
        assert back.controls == curve.controls
        assert back.final_loss == curve.final_loss
        np.testing.assert_array_equal(back.t, curve.t)
        np.testing.assert_array_equal(back.l, curve.l)


def test_a_form_without_points(tmp_path: Path) -> None:
    fields = curve_to_json(curves.reference()) | {"t": [], "l": [], "form": vars(curves.FORM)}
    curve = curve_from_json(fields, "curve.json")
    t = np.array([0.2, 0.5, 1.0])
    np.testing.assert_allclose(curve.at(t), curves.FORM.at(t, curves.SCHEDULE))


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    file.write_text("mine")
    with pytest.raises(UsageError, match=r"exists.*--force"):
        write_curve(curves.reference(), file)
    assert file.read_text() == "mine"
    write_curve(curves.reference(), file, force=True)
    assert read_curve(file).final_loss == 3.0
    assert [each.name for each in tmp_path.iterdir()] == ["curve.json"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": VERSION + 1}, "version 2, this megatron_ext reads up to 1"),
        ({"version": "1"}, "'version'"),
        ({"format": "other"}, "'format'"),
        ({"t": [0.1]}, "'t' has 1 numbers"),
        ({"t": [0.5, 0.1], "l": [1.0, 1.0]}, "does not increase"),
        ({"t": [0.5, 1.0], "l": [1.0, float("nan")]}, "'l'[1] is nan"),
        ({"t": [0.5, 1.0], "l": [1.0, "1"]}, "'l'[1] is '1'"),
        ({"t": [0.5, 1.0], "l": [1.0, -1.0]}, "not positive"),
        ({"t": [], "l": []}, "neither points nor a form"),
        ({"split": "test"}, "'split'"),
        ({"controls": {"params": "many"}}, "'params'"),
        (
            {"controls": {"schedule": {"style": "square", "warmup": 0, "floor": 0, "decay": 0}}},
            "none",
        ),
        ({"form": {"b": 1}}, "'q'"),
        ({"final_loss": 10**400}, "'final_loss'"),
    ],
)
def test_wrong_fields(change: dict[str, Any], expected: str) -> None:
    fields = curve_to_json(curves.reference()) | change
    with pytest.raises(UsageError) as error:
        curve_from_json(fields, "curve.json")
    assert expected in str(error.value)
    assert str(error.value).startswith(("curve.json", "schedule"))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    key=st.sampled_from(sorted(curve_to_json(curves.reference()))),
    value=VALUES,
    cut=st.one_of(st.none(), st.integers(0, 500)),
)
def test_any_field_may_be_anything(
    tmp_path: Path, key: str, value: object, cut: int | None
) -> None:
    fields = curve_to_json(curves.reference(points=5)) | {key: value}
    text = json.dumps(fields)
    file = tmp_path / "any.json"
    file.write_text(text if cut is None else text[:cut])
    try:
        curve = read_curve(file)
    except UsageError as error:
        check_one_line(error)
        return
    assert np.isfinite(curve.at(np.array([0.5, 1.0]))).all()
