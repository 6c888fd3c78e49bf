"""``python -m megatron_ext [--cpu] SCRIPT ARGS...``: run a Megatron script with our flags.

The script is not changed and need not know of us: it runs as ``__main__`` with its own directory
first on the import path, so the Megatron beside it is the one that is used.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.doctor import OTHER_APEX, is_other_apex
from megatron_ext.ending import end, end_by, end_under_way
from megatron_ext.errors import UsageError
from megatron_ext.python_version import check_python


def main(argv: Sequence[str] | None = None) -> None:
    """Install the hooks and run the script; ends the process on any error."""
    options = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        check_python()
        script = _script(options.script)
        sys.argv = [str(script), *options.script_args]
        sys.path[0] = str(script.parent)
        _prepare(options)
    except UsageError as error:
        end_by(error)
    except ModuleNotFoundError as error:
        end(f"{error}: install megatron_ext with what it needs; megatron-ext doctor says more", 2)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # what PyTorch raises for a failed checkpoint is no Exception
        end_by(error)


def _prepare(options: argparse.Namespace) -> None:
    import torch

    from megatron_ext import cpu, hooks
    from megatron_ext.hook import install
    from megatron_ext.megatron_version import check_version, comes_without_makefile

    if is_other_apex() and os.environ.get("RANK", "0") == "0":
        print(f"megatron_ext: warning: {OTHER_APEX}", file=sys.stderr, flush=True)
    if options.cpu:
        cpu.enable()
    elif not torch.cuda.is_available() and not _only_asks(options.script_args):
        raise UsageError(
            "no CUDA device on this machine: add --cpu before the script to train on the CPU"
        )
    untested = options.allow_untested_megatron
    check_version(untested or "--allow-untested-megatron" in options.script_args)
    install(hooks.ARGUMENT_HOOKS)
    if comes_without_makefile():
        install(hooks.WHEEL_HOOKS)
    if options.cpu:
        install(hooks.CPU_HOOKS)


def _only_asks(script_args: Sequence[str]) -> bool:
    return "-h" in script_args or "--help" in script_args


def build_parser() -> argparse.ArgumentParser:
    """The parser of what stands before the script."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext",
        description="Run a Megatron-LM script with the flags of megatron_ext added to its own.",
        epilog="All flags, Megatron's and ours: python -m megatron_ext SCRIPT --help",
        allow_abbrev=False,
    )
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, over gloo")
    parser.add_argument(
        "--allow-untested-megatron",
        action="store_true",
        help="run with a Megatron outside the supported range",
    )
    parser.add_argument("script", metavar="SCRIPT", help="for example pretrain_gpt.py")
    parser.add_argument(
        "script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="its flags and ours"
    )
    return parser


def _script(name: str) -> Path:
    script = Path(name)
    if not script.is_file():
        raise UsageError(f"no such script: {name}")
    return script.resolve()


def run() -> None:
    """Run as a program: `main`, and its end also while a batch is under way."""
    try:
        main()
    except SystemExit as error:
        end_under_way(error)
        raise


if __name__ == "__main__":
    run()
