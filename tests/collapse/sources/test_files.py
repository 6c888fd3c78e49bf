"""CSV, JSON lines and Megatron's console log: what is read, repaired and refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.collapse.sources import SourceOptions, read_histories, read_history
from megatron_ext.errors import UsageError
from tests.collapse.curves import check_one_line


def write(folder: Path, text: str | bytes, name: str = "run.csv") -> str:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def error_of(name: str, options: SourceOptions | None = None) -> str:
    with pytest.raises(UsageError) as error:
        read_history(name, options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_plain_csv(tmp_path: Path) -> None:
    history = read_history(write(tmp_path, "step,loss,lr\n1,5.0,0.1\n2,4.5,0.2\n3,4,0.1\n"))
    assert history.steps.tolist() == [1, 2, 3]
    assert history.losses.tolist() == [5, 4.5, 4]
    assert history.extras["lr"].tolist() == [0.1, 0.2, 0.1]
    assert history.split == "train"
    assert history.notes == ()


def test_wandbs_export(tmp_path: Path) -> None:
    text = (
        '"Step","run-7 - lm loss","run-7 - lm loss__MIN","run-7 - lm loss__MAX"\n'
        '"1","5","5","5"\n"2","","",""\n"3","4","4","4"\n'
    )
    history = read_history(write(tmp_path, text))
    assert history.steps.tolist() == [1, 3]
    assert history.losses.tolist() == [5, 4]


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters(tmp_path: Path, delimiter: str) -> None:
    text = "iteration,val_loss\n10,5\n20,4\n".replace(",", delimiter)
    history = read_history(write(tmp_path, text))
    assert history.split == "validation"
    assert history.steps.tolist() == [10, 20]


def test_one_run_out_of_several(tmp_path: Path) -> None:
    name = write(tmp_path, "size,step,loss\n1B,1,5\n1B,2,4\n2B,1,3\n2B,2,2\n")
    assert "--where size=1B" in error_of(name)
    history = read_history(name, SourceOptions(where={"size": "2B"}))
    assert history.losses.tolist() == [3, 2]
    assert history.metadata["size"] == "2B"
    assert "no row" in error_of(name, SourceOptions(where={"size": "3B"}))
    assert "'budget'" in error_of(name, SourceOptions(where={"budget": "1xC"}))


def test_all_runs_of_a_file(tmp_path: Path) -> None:
    rows = [f"{size},{c},{step},{9 - step}" for size in "AB" for c in "xy" for step in (1, 2, 3)]
    name = write(tmp_path, "size,budget,step,loss\n" + "\n".join(rows))
    assert len(read_histories(name, SourceOptions())) == 4
    some = read_histories(name, SourceOptions(where={"size": "C", "budget": "x"}))
    assert [run.metadata["size"] for run in some] == ["A", "B"]
    assert {run.metadata["budget"] for run in some} == {"x"}


def test_several_losses_must_be_chosen_from(tmp_path: Path) -> None:
    name = write(tmp_path, "step,loss_a,loss_b\n1,5,6\n2,4,5\n")
    assert "--column" in error_of(name)
    assert read_history(name, SourceOptions("loss_b")).losses.tolist() == [6, 5]
    assert "'loss_c'" in error_of(name, SourceOptions("loss_c"))


def test_the_later_run_wins(tmp_path: Path) -> None:
    steps = [1, 2, 3, 4, 3, 4, 5]
    text = "step,loss\n" + "".join(f"{step},{9 - i}\n" for i, step in enumerate(steps))
    history = read_history(write(tmp_path, text))
    assert history.steps.tolist() == [1, 2, 3, 4, 5]
    assert history.losses.tolist() == [9, 8, 5, 4, 3]
    assert history.restarts == (3,)
    assert any("the later run wins" in note for note in history.notes)


def test_gaps_and_bad_points_are_stated(tmp_path: Path) -> None:
    steps = [*range(1, 50), *range(200, 250)]
    losses = {10: "nan", 11: "inf", 12: "-1", 13: "0"}
    text = "step,loss\n" + "".join(f"{step},{losses.get(step, '3')}\n" for step in steps)
    history = read_history(write(tmp_path, text))
    assert history.bad_steps == (10, 11, 12, 13)
    assert np.isfinite(history.losses).all()
    notes = " ".join(history.notes)
    assert "no points between steps 49-200" in notes
    assert "4 points without a finite positive loss" in notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("step,loss\n", "no row"),
        ("step,loss\n1,5\n", "1 usable points"),
        ("step,loss\n1,5\n2,abc\n", "line 3, column 'loss': 'abc'"),
        ("step,loss\n1,5\n2,1_0\n", "line 3, column 'loss'"),
        ("step,loss\n1,5\ninf,4\n", "line 3, column 'step'"),
        ("step,loss\n1,5,7\n", "line 2: has 3 cells"),
        ("step,loss\n1,0\n2,-1\n", "0 usable points"),
        ("a,b\n1,2\n", "looks like a loss"),
        ("day,loss\n1,2\n", "no column of steps"),
        ("no table at all\n", "no CSV"),
        ('step,loss\n1,"5\n', "has 1 cells|is not a number|usable"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    message = error_of(write(tmp_path, text))
    assert any(part in message for part in expected.split("|")), message
    assert "run.csv" in message


def test_no_file_and_a_bare_directory(tmp_path: Path) -> None:
    assert "no such file" in error_of(str(tmp_path / "none.csv"))
    assert "is a directory" in error_of(str(tmp_path))


def test_json_lines(tmp_path: Path) -> None:
    lines = [{"train": {"loss": 5 - i, "lr": 0.1}, "step": i, "text": "x"} for i in range(4)]
    text = "\n".join(map(json.dumps, [{"config": 1}, *lines]))
    history = read_history(write(tmp_path, text, "log.jsonl"))
    assert history.losses.tolist() == [5, 4, 3, 2]
    broken = write(tmp_path, '{"step": 1, "loss": 2}\n{"step":', "broken.jsonl")
    assert "line 2" in error_of(broken)
    assert "no JSON object" in error_of(write(tmp_path, "{}\n[1]\n", "list.jsonl"))


LOG = """\
  lr .............................................. 0.001
  seq_length ...................................... 32
  weight_decay .................................... 0.1
  lr_decay_style .................................. linear
  train_iters ..................................... 40
  global_batch_size ............................... 8
 > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1000
"""
REPORT = (
    " [2026-01-01] iteration {i:8d}/      40 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): 12.3 | learning rate: 1.0E-03 | global batch size:     8 | lm loss: {loss:.6E}"
    " | loss scale: 1.0 | grad norm: 1.5 | number of skipped iterations:   0 |\n"
)


def test_megatrons_log(tmp_path: Path) -> None:
    text = LOG + "".join(REPORT.format(i=i, samples=8 * i, loss=5 - i / 10) for i in range(1, 31))
    text += " validation loss at iteration 20 | lm loss value: 4.0E+00 | lm loss PPL: 54 |\n"
    text += " validation loss at iteration 30 | lm loss value: 3.0E+00 | lm loss PPL: 20 |\n"
    name = write(tmp_path, text, "out.log")
    history = read_history(name)
    assert history.losses[-1] == pytest.approx(2.0)
    assert history.end == 40
    assert not history.is_complete
    assert history.fractions[-1] == pytest.approx(0.75)
    assert history.extras["grad_norm"].tolist() == [1.5] * 30
    from megatron_ext.collapse.controls import controls_of

    controls, _ = controls_of(history)
    assert controls.tpp == pytest.approx(40 * 8 * 32 / 1000)
    assert controls.tau == pytest.approx(8 * 32 / (0.001 * 0.1 * 40 * 8 * 32))
    validation = read_history(name, SourceOptions("lm loss validation"))
    assert validation.losses.tolist() == [4, 3]
    assert validation.split == "validation"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.text(alphabet='step,loss1\n"; \tnaif-+e.0', max_size=200).map(
            lambda text: ("step,loss\n" + text).encode()
        ),
        st.lists(st.tuples(st.floats(), st.floats()), max_size=20).map(
            lambda rows: ("step,loss\n" + "".join(f"{a},{b}\n" for a, b in rows)).encode()
        ),
        st.recursive(
            st.one_of(st.none(), st.floats(), st.text(max_size=5), st.integers()),
            lambda inner: st.dictionaries(st.sampled_from(["step", "loss", "x"]), inner),
            max_leaves=6,
        ).map(lambda value: json.dumps(value).encode()),
        st.text(max_size=80).map(
            lambda text: (
                LOG + REPORT.format(i=1, samples=1, loss=1) + " iteration " + text
            ).encode()
        ),
    ),
    name=st.sampled_from(["run.csv", "run.log", "run.jsonl", "run.wandb", "run"]),
)
def test_any_bytes_give_a_history_or_a_usage_error(tmp_path: Path, data: bytes, name: str) -> None:
    file = write(tmp_path, data, name)
    try:
        history = read_history(file)
    except UsageError as error:
        check_one_line(error)
        return
    assert history.steps.size >= 2
    assert (np.diff(history.steps) > 0).all()
    assert np.isfinite(history.losses).all()
    assert (history.losses > 0).all()
