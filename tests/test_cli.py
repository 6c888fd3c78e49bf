"""The command line: what is there, what is refused, and that looking costs nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from megatron_ext import __version__, cli


def test_every_command_has_a_module_with_the_two_functions() -> None:
    for command in cli.COMMANDS:
        module = importlib.import_module(command.module)
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["corpus", "--unknown"]])
def test_wrong_words_exit_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_megatron() -> None:
    script = (
        "import sys\n"
        "from megatron_ext import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'megatron', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for command in cli.COMMANDS:
        assert command.name in done.stdout
