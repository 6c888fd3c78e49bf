"""Installing, uninstalling and refusing, on the real Megatron."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from packaging.version import Version

import tests.preload  # noqa: F401
from megatron_ext import hooks
from megatron_ext.errors import UsageError
from megatron_ext.hook import Hook, install, installed, uninstall
from megatron_ext.megatron_version import (
    SUPPORTED_MEGATRON,
    check_version,
    is_supported,
    megatron_version,
)
from tests.ranks import check_ranks, run_ranks
from tests.training import RRFP, train, train_well


@pytest.fixture(autouse=True)
def _leave_nothing_behind():  # type: ignore[no-untyped-def]
    yield
    uninstall()


def test_every_module_that_imported_a_name_is_rebound_and_restored() -> None:
    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    late = types.ModuleType("someone_elses_script")
    original = schedules.get_forward_backward_func
    late.alias = original  # type: ignore[attr-defined]
    sys.modules[late.__name__] = late
    places = [
        (schedules, "get_forward_backward_func"),
        (pipeline_parallel, "get_forward_backward_func"),
        (training, "get_forward_backward_func"),
        (late, "alias"),
    ]
    install(hooks.RRFP_HOOKS)
    replacement = schedules.get_forward_backward_func
    assert replacement is not original
    assert all(getattr(*place) is replacement for place in places)
    install(hooks.RRFP_HOOKS)  # a second time changes nothing
    assert schedules.get_forward_backward_func is replacement
    uninstall(hooks.RRFP_HOOKS)
    assert all(getattr(*place) is original for place in places)
    uninstall(hooks.RRFP_HOOKS)
    assert schedules.get_forward_backward_func is original
    assert installed() == []
    del sys.modules[late.__name__]


def test_every_target_is_in_this_megatron() -> None:
    tables = [table for name, table in vars(hooks).items() if name.endswith("_HOOKS")]
    assert len(tables) >= 10
    every = [hook for table in tables for hook in table]
    install(every)
    assert installed() == every


def test_a_missing_target_is_named() -> None:
    hook = Hook("megatron.core.pipeline_parallel", "no_such", lambda f: f, "try")
    with pytest.raises(UsageError, match=r"has no megatron\.core\.pipeline_parallel\.no_such"):
        install([hook])


@pytest.mark.parametrize("version", ["0.17.0", "0.17.1", "0.18.2", "0.19.2", "0.20.0rc0", "0.20.3"])
def test_supported_versions(version: str) -> None:
    assert is_supported(Version(version))


@pytest.mark.parametrize("version", ["0.16.1", "0.21.0", "1.0"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("megatron_ext.megatron_version.megatron_version", lambda: Version(version))
    with pytest.raises(UsageError) as refusal:
        check_version()
    line = str(refusal.value)
    assert version in line
    assert SUPPORTED_MEGATRON in line
    assert "--allow-untested-megatron" in line
    assert "\n" not in line
    assert check_version(allow_untested=True) == Version(version)


def test_the_version_is_read_from_a_checkout(tmp_path: Path) -> None:
    check_ranks(run_ranks(1, _read_version_of_checkout, str(tmp_path)))


def _read_version_of_checkout(_: int, folder: str) -> None:
    core = Path(folder) / "megatron" / "core"
    core.mkdir(parents=True)
    lines = ["MAJOR = 0", "MINOR = 16", "PATCH = 1", "PRE_RELEASE = 'rc2'"]
    (core / "package_info.py").write_text("\n".join(lines))
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    assert megatron_version() == Version("0.16.1rc2")


@pytest.mark.multiprocess
def test_without_our_flags_megatron_runs_on_its_own_objects(corpus: Path) -> None:
    (record,) = train_well(corpus, 1, "--train-iters 1")
    assert record["hooks"] == [hook.target for hook in hooks.WHEEL_HOOKS + hooks.CPU_HOOKS]
    assert record["schedule"] == "builtins.function"
    assert record["schedule_module"] == "megatron.core.pipeline_parallel.schedules"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "flags", "named"),
    [
        (1, [], "--pipeline-model-parallel-size is 1"),
        (
            2,
            [
                "--pipeline-model-parallel-size",
                "2",
                "--position-embedding-type",
                "rope",
                "--mtp-num-layers",
                "1",
            ],
            "--mtp-num-layers",
        ),
        (
            2,
            ["--pipeline-model-parallel-size", "2", "--rrfp-live-limit", "0.1"],
            "--rrfp-live-limit",
        ),
    ],
)
def test_what_does_not_work_is_refused_at_start(
    corpus: Path, processes: int, flags: list[str], named: str
) -> None:
    ranks, _ = train(corpus, processes, [*flags, *RRFP])
    for rank in ranks:
        assert rank.exit_code == 2, rank.output
        assert named in rank.error_line
        assert "Traceback" not in rank.output
        assert "iteration        1/" not in rank.output
