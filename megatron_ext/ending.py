"""How a run ends on an error: one line, at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from typing import NoReturn

from megatron_ext.errors import PipelineError, UsageError
from megatron_ext.start_checks import refused_flags


def end(message: str, code: int) -> NoReturn:
    """Say why in one line and end the process at once, with its helpers.

    A normal exit would run destructors that wait for peers which may be gone. Helpers that stayed
    behind would keep what they inherited open: connections, and the pipes of the output.
    """
    sys.stdout.flush()
    print(f"megatron_ext: error: {message}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def end_by(error: BaseException) -> NoReturn:
    """End the process by an error: its own line, or its traceback and where the stage was."""
    if isinstance(error, UsageError):
        end(str(error), 2)
    if isinstance(error, PipelineError):
        end(str(error), 1)
    if (refused := refused_flags(error)) is not None:
        end(refused, 2)
    from megatron_ext import hooks

    traceback.print_exception(error)
    end(hooks.explain(error), 1)
