"""TensorBoard's and wandb's own files, and the wandb API (mocked: there is no server)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter

from megatron_ext.collapse.sources import SourceOptions, read_history
from megatron_ext.errors import UsageError
from tests.collapse.curves import check_one_line


def test_tensorboard(tmp_path: Path) -> None:
    for first, last, offset in ((1, 20, 0.0), (15, 30, 1.0)):  # the second one is a restart
        with SummaryWriter(str(tmp_path)) as writer:
            for step in range(first, last + 1):
                writer.add_scalar("lm loss", 5 - step / 10 + offset, step)
                writer.add_scalar("lm loss vs samples", 5.0, step * 8)
                writer.add_scalar("learning-rate", 0.1, step)
    history = read_history(str(tmp_path))
    assert history.steps.tolist() == list(range(1, 31))
    assert history.losses[13] == pytest.approx(5 - 1.4)
    assert history.losses[14] == pytest.approx(6 - 1.5)
    assert history.restarts == (15,)
    assert set(history.extras) == {"lr"}


def test_a_damaged_tensorboard_file(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 50):
            writer.add_scalar("loss", 1.0 + 1 / step, step)
    (file,) = tmp_path.glob("*tfevents*")
    file.write_bytes(file.read_bytes()[:-20])
    assert read_history(str(tmp_path)).steps[-1] == 48
    file.write_bytes(b"x" * 100)
    with pytest.raises(UsageError, match=r"no scalars|cannot read"):
        read_history(str(tmp_path))


@pytest.fixture(scope="module")
def wandb_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An offline run, written by wandb itself."""
    import wandb

    folder = tmp_path_factory.mktemp("wandb")
    with wandb.init(
        project="p", mode="offline", dir=str(folder), config={"weight_decay": 0.1, "params": 1000}
    ) as run:
        for step in range(1, 1201):
            run.log({"lm loss": 3 + 1 / step, "learning-rate": 0.1}, step=step)
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return file


def test_an_offline_wandb_run(wandb_file: Path) -> None:
    history = read_history(str(wandb_file.parent))
    assert history.steps.tolist() == list(range(1, 1201))
    assert history.losses[-1] == pytest.approx(3 + 1 / 1200)
    assert history.metadata["weight_decay"] == "0.1"
    assert history.notes == ()
    root = read_history(str(wandb_file.parents[2]))
    assert root.steps.size == history.steps.size


def test_a_truncated_wandb_file(wandb_file: Path, tmp_path: Path) -> None:
    data = wandb_file.read_bytes()
    cut = tmp_path / "cut.wandb"
    cut.write_bytes(data[: len(data) // 2])
    history = read_history(str(cut))
    assert 100 < history.steps.size < 1200
    assert any("read up to there" in note for note in history.notes)
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 255
    cut.write_bytes(damaged)
    assert any("checksum" in note for note in read_history(str(cut)).notes)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.floats(0, 1), patch=st.binary(max_size=12), keep=st.floats(0, 1))
def test_a_wandb_file_of_any_bytes(
    wandb_file: Path, tmp_path: Path, place: float, patch: bytes, keep: float
) -> None:
    data = bytearray(wandb_file.read_bytes())
    start = int(place * (len(data) - 1))
    data[start : start + len(patch)] = patch
    file = tmp_path / "any.wandb"
    file.write_bytes(data[: int(keep * len(data))])
    try:
        assert read_history(str(file)).steps.size >= 2
    except UsageError as error:
        check_one_line(error)


class FakeRun:
    """What wandb.Api().run() gives: a mock, as no test may talk to wandb's server."""

    summary = SimpleNamespace(keys=lambda: ["lm loss", "learning-rate", "_step"])
    config = {"params": "1M"}  # noqa: RUF012

    def scan_history(self, keys: list[str]) -> list[dict[str, float | str]]:
        assert keys[0] == "_step"
        return [{"_step": i, keys[1]: 5 - i / 10} for i in range(10)] + [
            {"_step": 10, keys[1]: "NaN"}
        ]


def test_the_wandb_api(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def run(path: str) -> FakeRun:
        if path != "me/project/abc":
            raise ValueError(f"Could not find run {path}")
        return FakeRun()

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(run=run))
    history = read_history("wandb:me/project/abc", SourceOptions())
    assert history.losses.tolist() == [5 - i / 10 for i in range(10)]
    assert history.bad_steps == (10,)
    assert history.metadata == {"params": "1M"}
    with pytest.raises(UsageError, match="wandb says: Could not find run"):
        read_history("wandb:me/project/none")
    with pytest.raises(UsageError, match="ENTITY/PROJECT/RUN_ID"):
        read_history("wandb:project")
