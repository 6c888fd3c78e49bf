"""How a run ends on an error: one line, at once."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
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
    from megatron_ext.pipeline import megatron_loop

    traceback.print_exception(error)
    end(megatron_loop.explain(error), 1)


def end_under_way(error: SystemExit, run_registered: bool = True) -> None:
    """End the process by `error` if a batch is under way; else do nothing.

    With --pipedream-2bw Megatron may end (--exit-interval, a signal, an alarm) when the next batch
    has begun. Then threads wait inside of the transport for messages that nobody sends any more.
    The interpreter would end them there, which aborts the process; so it ends without that, but
    after all that was registered for the end.

    Args:
        error: What ends it.
        run_registered: Whether what is registered with `atexit` has still to run.
    """
    from megatron_ext.pipeline import megatron_loop

    if not megatron_loop.batch_under_way():
        return
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    if run_registered:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
