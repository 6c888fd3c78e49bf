"""What the documentation tells people to type: run where that is quick, checked everywhere."""

from __future__ import annotations

import argparse
import ast
import csv
import glob
import re
import sys
import types
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import __main__ as runner
from megatron_ext import arguments, cli
from megatron_ext.errors import UsageError
from tests.docs.examples import (
    PAGES,
    PROGRAM,
    REPOSITORY,
    Block,
    blocks,
    without_environment,
)

WITH_BLOCKS = [page for page in PAGES if blocks(page)]
NAMES = [str(page.relative_to(REPOSITORY)) for page in WITH_BLOCKS]

# Words that stand for something of the reader's, and what sends a command to the background.
PLACEHOLDERS = {"...", "YOUR", "FLAGS", "SCRIPT", "SCRIPT.py", "&"}
# Programs of others, of which only the name is checked.
OTHERS = {"cd", "git", "lint-imports", "mkdir", "mkdocs", "mypy", "pip", "ruff", "source", "tail"}
OTHERS |= {"scancel", "squeue", "touch", "wandb"}
# Words of the shell's own; the commands between them are checked.
OTHERS |= {"do", "done", "fi", "for", "if", "shellcheck", "wait"}
# Programs that start one of our scripts.
STARTERS = {"bash", "python", "sbatch"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples read: loss curves, logs and traces under the names that they use."""
    folder = tmp_path_factory.mktemp("inputs")
    curves: dict[str, list[dict[str, str]]] = defaultdict(list)
    with (REPOSITORY / "docs" / "data" / "family.csv").open() as file:
        for row in csv.DictReader(file):
            curves[row["run"]].append(row)
    for name, run in (("small.csv", "width-176"), ("large.csv", "width-272")):
        lines = ["step,tokens,val_loss"]
        lines += [f"{row['step']},{row['tokens']},{row['val_loss']}" for row in curves[run]]
        (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "runs").mkdir()
    for name, run in (("runs/one.log", "width-272"), ("runs/two.log", "fault-176")):
        last = curves[run][-1]["step"]
        lines = [
            f" [2026-01-01 00:00:00] iteration {row['step']:>8}/{last:>8} | "
            f"consumed samples: {row['tokens']:>12} | lm loss: {float(row['val_loss']):.6E} |"
            for row in curves[run]
        ]
        (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "run.log").write_text((folder / "runs" / "two.log").read_text())
    assert cli.main(["collapse", "fit", str(folder / "small.csv"), "--out", f"{folder}/ref"]) == 0
    trace = ["--stages", "4", "--microbatches", "8", "--trace", f"{folder}/out/trace"]
    assert cli.main(["simulate", *trace]) == 0
    return folder


@pytest.fixture
def folder(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """An own working directory for the examples of a page."""
    for name in ("small.csv", "large.csv", "run.log", "runs"):
        (tmp_path / name).symlink_to(inputs / name)
    (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trace").symlink_to(inputs / "out" / "trace")
    for name in ("DIR", "RUN_DIR", "RUN_A", "RUN_B"):
        (tmp_path / name).symlink_to(inputs / "out" / "trace")
    if "--out reference.json" not in request.getfixturevalue("page").read_text():
        (tmp_path / "reference.json").symlink_to(inputs / "ref")
    monkeypatch.chdir(tmp_path)
    # Hints of the page are found there; one that another page has saved is forgotten.
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name, module in sys.modules.items() if _is_of_an_example(module)]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def _is_of_an_example(module: types.ModuleType) -> bool:
    return getattr(module, "__name__", "") == "my_hints"


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=NAMES)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        if not block.runnable:
            assert block.not_run, (
                f"{block.place} cannot be run here: put a comment above it that says why, "
                "<!-- not run: REASON -->"
            )


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=NAMES)
def test_examples(page: Path, folder: Path, megatron_parser: argparse.ArgumentParser) -> None:
    for block in blocks(page):
        if block.save_as:
            (folder / block.save_as).write_text(block.text)
    for block in blocks(page):
        if block.language == "python" and not block.not_run:
            exec(compile(block.text, block.place, "exec"), {"__name__": "example"})
        elif block.language == "bash":
            for words in block.commands:
                _check(without_environment(words), block, megatron_parser)


def _check(words: list[str], block: Block, megatron_parser: argparse.ArgumentParser) -> None:
    """Run a command, or check its flags where its block is not run."""
    program = words[0].rstrip(";")
    where = f"{block.place}: {' '.join(words)}"
    if program == PROGRAM:
        given = [found for word in words[1:] for found in sorted(glob.glob(word)) or [word]]
        if block.not_run:
            given = [word for word in given if word not in PLACEHOLDERS]
            assert cli.build_parser(given).parse_args(given), where
        else:
            assert cli.main(given) == 0, where
    elif program.startswith("--"):
        _check_training(words, where, megatron_parser)
    elif program == "torchrun" or words[:3] == ["python", "-m", "megatron_ext"]:
        _check_training(_behind_the_launcher(words), where, megatron_parser)
    elif program in STARTERS or program.startswith(("scripts/", ".ci/")):
        _check_script([word for word in words if word not in STARTERS], where)
    else:
        assert program in OTHERS, f"{where}: how is this checked?"


def _behind_the_launcher(words: list[str]) -> list[str]:
    """Megatron's and our flags behind the script; what stands before it is checked here."""
    given = [word for word in words if word not in PLACEHOLDERS]
    if "megatron_ext" in given:
        rest = given[given.index("megatron_ext") + 1 :]
        behind = [place for place, word in enumerate(rest) if word.endswith(".py")]
        if behind:
            return list(runner.build_parser().parse_args(rest).script_args)
        return rest if rest != ["--help"] else []
    (script,) = [place for place, word in enumerate(given) if word.endswith(".py")]
    return given[script + 1 :]


@pytest.fixture(scope="module")
def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's own flags and ours."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return arguments.add_arguments(add_megatron_arguments(parser))


def _check_training(flags: list[str], where: str, parser: argparse.ArgumentParser) -> None:
    """Whether Megatron and we know every flag, and ours go together."""
    given = [word for word in flags if word not in PLACEHOLDERS]
    try:
        args, unknown = parser.parse_known_args(given)
    except argparse.ArgumentError as error:
        pytest.fail(f"{where}: {error}")
    assert not unknown, f"{where}: nobody knows {' '.join(unknown)}"
    if args.pipeline_model_parallel_size == 1:
        args.pipeline_model_parallel_size = 8  # what the reader has
    args.train_iters = args.train_iters or 1000
    settings: list[Any] = [
        arguments.rrfp_config(args),
        arguments.pipedream_2bw_config(args),
        arguments.jitter_config(args),
        arguments.collapse_config(args),
    ]
    ours = [word for word in given if word.startswith(("--rrfp", "--pipedream", "--collapse"))]
    assert any(settings) or not ours, f"{where}: {ours} do nothing"


def _check_script(words: list[str], where: str) -> None:
    """Whether the script is there and has these flags."""
    path = REPOSITORY / words[0]
    assert path.is_file(), where
    if path.name == "test.sh":
        for word in words[1:]:
            if "/" in word:
                assert (REPOSITORY / word).exists(), where
        return
    program = path.with_suffix(".py")
    known = set(re.findall(r"--[a-z][a-z-]*", path.read_text() if path.suffix != ".py" else ""))
    known |= {
        node.value
        for node in ast.walk(ast.parse(program.read_text() if program.exists() else ""))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for word in words[1:]:
        if word.startswith("--"):
            assert word in known, f"{where}: {path.name} has no {word}"


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ("{run} --pipeline-schedule rrfp --rrfp-hnit bf", AssertionError, "knows --rrfp-hnit"),
        ("{run} --pipeline-schedule rrfp --num-layer 3", AssertionError, "knows --num-layer"),
        ("{run} --pipeline-schedule rrfp --rrfp-hint bwf", UsageError, "no hint 'bwf'"),
        ("{run} --rrfp-live-limit 2p", AssertionError, "do nothing"),
        ("python scripts/bench_schedules.py --jitter-level", AssertionError, "has no"),
        ("scripts/missing.sh", AssertionError, "missing.sh"),
        ("scripts/test.sh tests/test_missing.py", AssertionError, "test_missing.py"),
        ("megatron-ext simulate --stage 8", SystemExit, "2"),
        ("frobnicate", AssertionError, "how is this checked"),
    ],
)
def test_a_wrong_example_fails(
    command: str,
    error: type[BaseException],
    said: str,
    megatron_parser: argparse.ArgumentParser,
) -> None:
    text = command.format(run="torchrun -m megatron_ext pretrain_gpt.py")
    block = Block("page:1", "bash", text, "an example", "")
    (words,) = block.commands
    with pytest.raises(error, match=said):
        _check(words, block, megatron_parser)


def test_what_is_run() -> None:
    def block(text: str) -> Block:
        return Block("page:1", "bash", text, "", "")

    assert block("PYTHONPATH=. megatron-ext simulate  # quick").runnable
    assert not block("megatron-ext doctor\npip install x").runnable
