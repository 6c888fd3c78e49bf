"""Waiting for neighbours, and what to say when it does not end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ext.errors import PipelineError
from megatron_ext.pipeline.agreement import Agreement
from megatron_ext.pipeline.batch import Run
from megatron_ext.pipeline.trace import Trace
from megatron_ext.pipeline.transport.base import TransportError
from megatron_ext.pipeline.whereabouts import Whereabouts


class Waiting:
    """Of one stage.

    Args:
        links: To the neighbours.
        agreement: With the ranks that share tasks.
        whereabouts: Names what is awaited.
        trace: Written when the process is ended from outside; None without one.
        timeout_s: Seconds without any progress after which the run is ended.
    """

    def __init__(
        self,
        links: Any,
        agreement: Agreement,
        whereabouts: Whereabouts,
        trace: Trace | None,
        timeout_s: float,
    ) -> None:
        self._links = links
        self._agreement = agreement
        self._whereabouts = whereabouts
        self._trace = trace
        self._timeout_s = timeout_s

    def for_anything(self, run: Run) -> None:
        """Wait until a message came, or an update can go on.

        Raises:
            PipelineError: Nothing happened for the configured time.
        """
        with self._telling_of_termination(run, self._whereabouts.awaited):
            happened = self._agreement.wait(self._links, self._timeout_s)
        if not happened:
            raise PipelineError(
                f"{self._whereabouts.where()}: {self._whereabouts.no_progress()} while waiting "
                f"for {self._whereabouts.awaited(run)}; that rank, or one that it waits for, "
                "hangs or is slower than this limit allows"
            )

    def for_takers(self, run: Run) -> None:
        """Wait until the neighbours have taken what this stage sent.

        Raises:
            PipelineError: One is lost, or does not take it in time.
        """
        try:
            with self._telling_of_termination(run, self._whereabouts.takers):
                flushed = self._links.flush(self._timeout_s)
        except TransportError as error:
            raise self._whereabouts.lost_peer(run, error) from error
        if not flushed:
            raise PipelineError(
                f"{self._whereabouts.where()}: {self._whereabouts.no_progress()} while waiting "
                f"for {self._whereabouts.takers(run)}"
            )

    @contextlib.contextmanager
    def _telling_of_termination(self, run: Run, awaited: Callable[[Run], str]) -> Iterator[None]:
        """On SIGTERM say what was awaited: launchers end the peers of a dead rank with it.

        Only while waiting here, and only if nobody else handles the signal: inside a collective
        a Python handler would keep the default action from ending the process.
        """

        def tell(number: int, _: object) -> None:
            line = f"{self._whereabouts.where()}: ended by SIGTERM while waiting for {awaited(run)}"
            os.write(sys.stderr.fileno(), f"megatron_ext: error: {line}\n".encode())
            if self._trace:
                self._trace.write(run.statistics, line)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        free = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if free:
            signal.signal(signal.SIGTERM, tell)
        try:
            yield
        finally:
            if free:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
