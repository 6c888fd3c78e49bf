"""What a Megatron that carries our patches calls by itself, without ``-m megatron_ext``.

Its `megatron.training.extensions` adds our flags to its own and hands over the validated
arguments. Errors end the run as they do under ``-m megatron_ext``: in one line, on every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megatron_ext import hooks
from megatron_ext.ending import end, end_by, end_under_way
from megatron_ext.errors import UsageError
from megatron_ext.hook import installed
from megatron_ext.megatron_version import check_version

INTERFACE = 1
"""The `INTERFACE` of the patches that this megatron_ext goes with."""


def add_arguments(parser: Any) -> Any:
    """Add our flags to Megatron's parser."""
    with _ending_in_one_line():
        theirs = importlib.import_module("megatron.training.extensions").INTERFACE
        if theirs != INTERFACE:
            raise UsageError(
                f"this Megatron carries the patches of another megatron_ext (interface {theirs}, "
                f"here {INTERFACE}): reverse them and apply those of this one"
            )
        return hooks.add_arguments(parser)


def complete_arguments(args: Any) -> None:
    """Complete parsed arguments that are not validated yet."""
    with _ending_in_one_line():
        hooks.complete_arguments(args)


def configure(args: Any) -> None:
    """Set up what the validated arguments ask for."""
    with _ending_in_one_line():
        before = installed()
        hooks.configure(args)
        if set(installed()) - set(before):
            check_version(args.allow_untested_megatron)
            sys.excepthook = _end_by_uncaught
        if getattr(args, "pipedream_2bw", False):
            _end_well_with_a_batch_under_way()


def _end_well_with_a_batch_under_way() -> None:
    """See `end_under_way`: here nobody stands around the script to catch its SystemExit."""
    code = 0

    def on_train_end(context: Any) -> None:
        nonlocal code
        code = context.exit_code or 0

    # After the other listeners, one of which may set the code.
    listener = SimpleNamespace(on_train_end=on_train_end)
    importlib.import_module("megatron.training.callbacks").add(listener)
    # Registered first of all, so it runs last.
    atexit.register(lambda: end_under_way(SystemExit(code), run_registered=False))


def _end_by_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    # PyTorch wraps this hook in one that keeps what is written to print it later: after the end.
    with contextlib.redirect_stderr(sys.__stderr__):
        end_by(error)


@contextlib.contextmanager
def _ending_in_one_line() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        end(str(error), 2)
