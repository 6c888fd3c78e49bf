"""Keeps a stage's compute thread at most one task ahead of its GPU.

A task returns when its kernels are enqueued, long before they have run. A thread that went on at
once would choose tasks long before their turn, and not know what arrives meanwhile. So before each
choice it waits until at most one task is unfinished: the one that runs. The next one is then
enqueued right behind it, and the GPU does not wait either.

On the CPU a task is done when it returns, and nothing here does anything.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ext.pipeline.batch_statistics import TaskSpan
from megatron_ext.pipeline.task import Task

_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 500e-6


class DeviceStuckError(Exception):
    """A task does not end on the GPU."""


class DeviceQueue:
    """The tasks of one stage that its GPU may not have finished.

    Args:
        device: Where the tasks run.
        timeout_s: Longest time that a task may take on the GPU.
        event: Makes a CUDA event, timed or not.
    """

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        event: Callable[..., Any] = torch.cuda.Event,
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._timeout_s = timeout_s
        self._event = event
        self._unfinished: deque[tuple[Task, Any]] = deque()
        self._base: tuple[Any, float] | None = None
        """An event and the host's time of it, while times are kept."""
        self._timed: list[tuple[Task, Any, Any]] = []

    def begin_batch(self, *, timed: bool) -> None:
        """Start a batch.

        Args:
            timed: Whether to keep when the GPU begins and ends each task. The GPU must be idle to
                compare its clock with the host's, so this waits for it.
        """
        self._base, self._timed = None, []
        if not (timed and self._on_gpu):
            return
        event = self._event(enable_timing=True)
        event.record()
        event.synchronize()
        self._base = event, time.perf_counter()

    def wait_for_room(self) -> None:
        """Wait until at most one task is unfinished.

        Raises:
            DeviceStuckError: One does not end in time.
        """
        while self._unfinished and self._unfinished[0][1].query():
            self._unfinished.popleft()
        while len(self._unfinished) > 1:
            self._wait_for(*self._unfinished.popleft())

    @contextlib.contextmanager
    def running(self, task: Task) -> Iterator[None]:
        """Around the body, which enqueues `task`."""
        if not self._on_gpu:
            yield
            return
        timed = self._base is not None
        begin = self._event(enable_timing=True) if timed else None
        if begin is not None:
            begin.record()
        yield
        end = self._event(enable_timing=timed)
        end.record()
        self._unfinished.append((task, end))
        if begin is not None:
            self._timed.append((task, begin, end))

    def spans(self) -> list[TaskSpan]:
        """When the GPU ran the tasks of a timed batch, in the host's time; waits for their end.

        Raises:
            DeviceStuckError: A task does not end in time.
        """
        if self._base is None:
            return []
        while self._unfinished:
            self._wait_for(*self._unfinished.popleft())
        base, at = self._base
        return [
            TaskSpan(
                task,
                at + base.elapsed_time(begin) * 1e-3,
                at + base.elapsed_time(end) * 1e-3,
            )
            for task, begin, end in self._timed
        ]

    def _wait_for(self, task: Task, event: Any) -> None:
        started, pause = time.monotonic(), _SHORTEST_SLEEP_S
        while not event.query():
            if time.monotonic() - started > self._timeout_s:
                raise DeviceStuckError(f"the {task} does not end on the GPU")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_S)
