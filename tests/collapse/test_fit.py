"""Fits, power law, recipe, ranking and the refusal to compare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_ext.collapse.check import CheckConfig, CheckResult, check
from megatron_ext.collapse.comparable import compare_controls
from megatron_ext.collapse.controls import Controls, controls_of, parse_size
from megatron_ext.collapse.curve import Curve, final_loss_of, make_curve, moving_average
from megatron_ext.collapse.fit import fit_curve, fit_family
from megatron_ext.collapse.form import FamilyForm, Form
from megatron_ext.collapse.power_law import fit_power_law, size_for
from megatron_ext.collapse.predict import rank
from megatron_ext.collapse.recipe import make_recipe, tau_for
from megatron_ext.collapse.schedule import NamedSchedule, parse_schedule, sample_schedule
from megatron_ext.errors import UsageError
from tests.collapse import curves

FAMILY = FamilyForm(b_c=0.05, b_e=-0.6, q_c=1.0, q_e=-0.3)


def member(tau: float, tpp: float) -> Curve:
    controls = replace(curves.CONTROLS, given_tau=tau, given_tpp=tpp, schedule=curves.SCHEDULE)
    t = np.arange(1, 301) / 300
    noise = np.random.default_rng(int(1000 * tau)).normal(0, 3e-4, t.size)
    values = FAMILY.curve(tau, tpp).at(t, curves.SCHEDULE) + noise
    return Curve("member", controls=controls, final_loss=3.0, t=t, l=values)


def test_the_form_ends_at_one_and_falls() -> None:
    t = np.linspace(0.01, 1, 200)
    values = Form(b=0.3, q=0.5).at(t, NamedSchedule("linear", warmup=0.05))
    assert values[-1] == pytest.approx(1.0)
    assert (np.diff(values[t > 0.1]) < 0).all()


def test_one_curve_is_fitted() -> None:
    fit = fit_curve(member(0.1, 20.0))
    true = FAMILY.curve(0.1, 20.0)
    assert fit.error < 5e-4
    assert fit.form.b == pytest.approx(true.b, rel=3 * fit.b_error + 0.05)
    t = curves.reference().t
    noise = np.random.default_rng(0).normal(0, 1e-3, t.size)
    flat = replace(curves.reference(), l=Form(b=1e-4, q=1.0).at(t, curves.SCHEDULE) + noise)
    assert fit_curve(flat).indistinct  # without a learning-rate term there is no q


def test_a_family_is_fitted() -> None:
    members = [
        member(tau, tpp) for tau, tpp in ((0.05, 20.0), (0.2, 20.0), (0.1, 80.0), (0.3, 200.0))
    ]
    fit = fit_family(members)
    assert fit.form.b_e == pytest.approx(FAMILY.b_e, abs=0.2)
    assert max(fit.errors) < 1e-3
    assert len([error for error in fit.held_out if error is not None]) == 4
    one_tpp = fit_family(members[:2], hold_out=False)
    assert one_tpp.form.q_e == pytest.approx(0, abs=1e-6)
    assert "one TPP" in one_tpp.notes[0]
    assert not np.isfinite(one_tpp.parameter_errors[3])
    with pytest.raises(UsageError, match="at least two"):
        fit_family(members[:1])


def test_a_power_law() -> None:
    sizes = [1e8, 2e8, 4e8, 8e8]
    law = fit_power_law(sizes, [2.0 + 50 * n**-0.25 for n in sizes])
    assert law.at(3.2e9) == pytest.approx(2.0 + 50 * 3.2e9**-0.25, rel=0.005)
    assert size_for(law, law.at(3.2e9)) == pytest.approx(3.2e9, rel=1e-3)
    two = fit_power_law([1e8, 4e8], [3.0, 2.7])
    assert two.floor == 0
    assert two.at(4e8) == pytest.approx(2.7)
    for wrong in (([1e8], [3.0]), ([1e8, 2e8], [3.0, 3.1]), ([1e8, 1e8], [3.0, 2.0])):
        with pytest.raises(UsageError):
            fit_power_law(*wrong)


def test_the_recipe_meets_tau_after_rounding() -> None:
    assert [round(tau_for(tpp), 3) for tpp in (20, 80, 234)] == [0.175, 0.088, 0.051]
    recipe = make_recipe(3e8, 6e9, lr=1e-3)
    tokens = recipe.train_iters * recipe.batch_tokens
    assert tokens == pytest.approx(6e9, rel=0.001)
    tau = recipe.batch_tokens / (recipe.lr * recipe.weight_decay * tokens)
    assert tau == pytest.approx(tau_for(20), rel=1e-9)
    flags = recipe.megatron_flags()
    for flag, value in {"--lr-decay-style": "linear", "--min-lr": "0"}.items():
        assert flags[flags.index(flag) + 1] == value
    assert any("outside" in note for note in make_recipe(3e8, 3e8).notes)
    for wrong in ({"params": -1.0}, {"tokens": float("nan")}, {"lr": 0.0}, {"sequence_length": 0}):
        with pytest.raises(UsageError, match="--"):
            make_recipe(**{"params": 1e8, "tokens": 2e9, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="less than one batch"):
        make_recipe(1e3, 1e3)


def result(run: str, loss: float, error: float, **more: object) -> CheckResult:
    fields = {
        "run": run,
        "reference": "r",
        "comparable": True,
        "reasons": (),
        "fraction": 0.3,
        "final_loss": None,
        "predicted_final_loss": loss,
        "interval": (loss - 1.96 * error, loss + 1.96 * error),
        "provisional": False,
        "mean_deviation": None,
        "steepness": None,
        "alarms": (),
        "notes": (),
    }
    return CheckResult(**{**fields, **more})  # type: ignore[arg-type]


def test_ranking_and_regret() -> None:
    runs = [result("b", 3.00, 0.01), result("a", 2.99, 0.01), result("c", 3.20, 0.01)]
    runs.append(result("d", 0, 0, predicted_final_loss=None, interval=None, reasons=("TPP",)))
    first, second, third, none = rank(runs)
    assert [each.run for each in (first, second, third, none)] == ["a", "b", "c", "d"]
    assert [each.stop for each in (first, second, third, none)] == [False, False, True, False]
    assert none.reasons == ("TPP",)
    # Two equal runs: half the mean difference of two normals.
    _, equal = rank([result("a", 3.0, 0.01), result("b", 3.0, 0.01)])
    assert equal.regret == pytest.approx(0.01 * np.sqrt(2) / np.sqrt(2 * np.pi))
    assert second.regret is not None
    assert second.regret > (third.regret or 0)
    assert not rank([result("a", 3.0, 0.01), result("b", 4.0, 0.01, provisional=True)])[1].stop


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokens": 8e9}, "TPP differs 4.00 times: 80 against 20"),
        ({"weight_decay": 0.4}, "tau differs 4.00 times"),
        ({"weight_decay": 0.0}, "tau differs: inf"),
        ({"schedule": parse_schedule("cosine:0.1")}, "schedule: learning rates"),
    ],
)
def test_controls_that_differ(change: dict[str, object], expected: str) -> None:
    known = replace(curves.CONTROLS, schedule=curves.SCHEDULE)
    assert compare_controls(known, known).reasons == ()
    found = compare_controls(replace(known, **change), known)  # type: ignore[arg-type]
    assert any(expected in reason for reason in found.reasons)


def test_rounded_sizes_and_unknown_controls() -> None:
    assert parse_size("1B") == (1e9, 0.5)
    assert parse_size("370M") == pytest.approx((370e6, 0.5 / 370))
    assert parse_size("1000") == (1000.0, 0.0)
    assert parse_size("big") is None
    reference = Controls(params=1.9e8, tokens=3.8e9)
    run = Controls(params=1e9, params_error=0.5, tokens=25.6e9)  # 1.28e9 parameters, really
    assert compare_controls(run, reference).reasons == ()
    assert compare_controls(replace(run, params_error=0.0), reference).reasons
    nothing = compare_controls(Controls(), Controls())
    assert nothing.reasons == ()
    assert len(nothing.unknown) == 3


def test_check_refuses_and_can_be_forced() -> None:
    t, losses = curves.run(fault=0.02 * (curves.run()[0] >= 0.6))
    history = curves.history(t, losses)
    reference = curves.reference()
    given = replace(curves.CONTROLS, tokens=8e9)
    refused = check(history.until(0.8), [reference], CheckConfig(given=given))
    assert not refused.comparable
    assert (refused.predicted_final_loss, refused.alarms) == (None, ())
    forced = check(history.until(0.8), [reference], CheckConfig(given=given, force=True))
    assert not forced.comparable
    assert forced.predicted_final_loss is not None
    assert [alarm.kind for alarm in forced.alarms] == ["departure"]
    other = replace(reference, controls=Controls(given_tpp=80.0), source="other")
    second = check(history, [other, reference], CheckConfig(given=curves.CONTROLS))
    assert (second.reference, second.comparable) == ("reference", True)


def test_a_steeper_family_does_not_collapse() -> None:
    t, losses = curves.run(noise=0.0003)
    steeper = 2.5 * (1 + 1.5 * (losses / 2.5 - 1))
    found = check(curves.history(t, steeper), [curves.reference()])
    assert not found.comparable
    assert "does not collapse" in found.reasons[0]
    assert found.steepness == pytest.approx(0.5, abs=0.05)


def test_moving_average_and_final_loss() -> None:
    steps = np.arange(1.0, 1001)
    np.testing.assert_allclose(moving_average(steps, 2 * steps, 100), 2 * steps)
    noise = np.random.default_rng(0).normal(3.0, 0.3, 1000)
    assert moving_average(steps, noise, 100)[200:800].std() < 0.05
    history = curves.history(steps / 1000, noise)
    loss, error = final_loss_of(history, 100)
    assert abs(loss / 3 - 1) < 4 * error
    assert 0.005 < error < 0.02
    validation = replace(history, split="validation")
    assert final_loss_of(validation)[0] == noise[-1]
    with pytest.raises(UsageError, match="needs the final loss"):
        make_curve(replace(history, end_step=2000.0))


def test_schedules() -> None:
    t = np.array([0.0, 0.05, 0.1, 0.55, 1.0])
    linear = parse_schedule("linear", warmup=0.1)
    np.testing.assert_allclose(linear.at(t), [0, 0.5, 1, 0.5, 0])
    np.testing.assert_allclose(parse_schedule("cosine:0.1").at(t[[0, -1]]), [1, 0.1])
    np.testing.assert_allclose(parse_schedule("wsd:0:0.2").at(np.array([0.7, 0.9])), [1, 0.5])
    for wrong in ("square", "linear:x", "linear:2", "linear:0:0:0"):
        with pytest.raises(UsageError):
            parse_schedule(wrong)
    rates = np.array([0.5e-3, 1e-3, 0.5e-3, 1e-4, 9.7])  # 9.7e-05, cut to a width
    schedule, left_out = sample_schedule(np.linspace(0, 1, 5), rates, 1e-3)
    assert left_out == 1
    assert schedule is not None
    assert schedule.span == (0.0, 0.75)


def test_controls_from_megatrons_arguments() -> None:
    metadata = {
        "params": "1000000",
        "train_iters": "1000",
        "global_batch_size": "16",
        "seq_length": "128",
        "lr": "0.01",
        "min_lr": "0.001",
        "lr_decay_style": "WSD",
        "lr_wsd_decay_iters": "250",
        "lr_warmup_iters": "100",
        "weight_decay": "0.1",
    }
    history = curves.history(*curves.run(), metadata=metadata, end_step=1000.0)
    controls, _ = controls_of(history)
    assert controls.tpp == pytest.approx(2.048)
    assert controls.tau == pytest.approx(1 / (0.01 * 0.1 * 1000))
    assert controls.schedule == NamedSchedule("wsd", warmup=0.1, floor=0.1, decay=0.25)
