"""``python -m megatron_ext [--cpu] SCRIPT ARGS...``: run a Megatron script with our flags.

The script is not changed and need not know of us: it runs as ``__main__`` with its own directory
first on the import path, so the Megatron beside it is the one that is used.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_ext.errors import PipelineError, UsageError


def main(argv: Sequence[str] | None = None) -> None:
    """Install the hooks and run the script; ends the process on any error."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    try:
        script = _script(options.script)
        sys.argv = [str(script), *options.script_args]
        sys.path[0] = str(script.parent)
        _prepare(options)
    except UsageError as error:
        _end(str(error), 2)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except UsageError as error:
        _end(str(error), 2)
    except PipelineError as error:
        _end(str(error), 1)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # what PyTorch raises for a failed checkpoint is no Exception
        from megatron_ext import hooks

        traceback.print_exc()
        _end(hooks.explain(error), 1)


def _prepare(options: argparse.Namespace) -> None:
    import torch

    from megatron_ext import cpu, hooks

    if options.cpu:
        cpu.enable()
    elif not torch.cuda.is_available() and not _only_asks(options.script_args):
        raise UsageError(
            "no CUDA device on this machine: add --cpu before the script to train on the CPU"
        )
    untested = options.allow_untested_megatron
    hooks.check_version(untested or "--allow-untested-megatron" in options.script_args)
    hooks.install(hooks.ARGUMENT_HOOKS)
    if hooks.comes_without_makefile():
        hooks.install(hooks.WHEEL_HOOKS)
    if options.cpu:
        hooks.install(hooks.CPU_HOOKS)


def _only_asks(script_args: Sequence[str]) -> bool:
    return "-h" in script_args or "--help" in script_args


def _parse(argv: Sequence[str]) -> argparse.Namespace:
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
    parser.add_argument("script_args", metavar="ARGS", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _script(name: str) -> Path:
    script = Path(name)
    if not script.is_file():
        raise UsageError(f"no such script: {name}")
    return script.resolve()


def _end(message: str, code: int) -> NoReturn:
    """Say why in one line and end the process at once, with its helpers.

    A normal exit would run destructors that wait for peers which may be gone. Helpers that stayed
    behind would keep what they inherited open: connections, and the pipes of the output.
    """
    sys.stdout.flush()
    print(f"megatron_ext: error: {message}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def run() -> None:
    """Run as a program: `main`, and its end also while a batch is under way.

    With --pipedream-2bw Megatron may end (--exit-interval, a signal, an alarm) when the next batch
    has begun. Then threads wait inside of the transport for messages that nobody sends any more.
    The interpreter would end them there, which aborts the process; so it ends without that, but
    after all that was registered for the end.
    """
    try:
        main()
    except SystemExit as end:
        from megatron_ext import hooks

        if not hooks.batch_under_way():
            raise
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run()
