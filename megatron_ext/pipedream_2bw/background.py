"""Runs the update of a batch between the tasks of the next one, without changing its code.

An update is Megatron's own reduction of gradients and its optimizer's own step. Both wait for
other ranks again and again. Here they run in a thread of their own that holds a baton while it
computes; where it would wait for a collective it hands the baton to the compute thread, which goes
on with tasks and gives it back between two of them. So only one of the two ever computes, and each
finds all pointers as it left them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_local = threading.local()


def current() -> BackgroundUpdate | None:
    """The update that the calling thread runs, or None in any other thread."""
    update: BackgroundUpdate | None = getattr(_local, "update", None)
    return update


class BackgroundUpdate:
    """One update.

    Args:
        work: What to run; its result is `result`.
        enter: Called by the compute thread before it hands the baton over.
        leave: Called by the compute thread when it has it back.
        wake: Called by the update's thread when it wants the baton.
        device: Where the model is.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        *,
        enter: Callable[[], None],
        leave: Callable[[], None],
        wake: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._work = work
        self._enter, self._leave, self._wake = enter, leave, wake
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._wants = True
        self._error: BaseException | None = None
        self.done = False
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, name="pipedream-2bw-update", daemon=True)
        self._thread.start()

    @property
    def wants(self) -> bool:
        """Whether the update can go on."""
        return self._wants and not self.done

    def go_on(self) -> None:
        """Let the update run until it waits for other ranks or is done; by the compute thread.

        Raises:
            Exception: What the update raised.
        """
        self._enter()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._go.release()
        self._back.acquire()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._leave()
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Around what waits for other ranks; by the update's thread."""
        self._wants = False
        self._back.release()
        try:
            yield
            if self._stream is not None:  # a collective is only enqueued by then
                self._stream.synchronize()
        finally:
            self._wants = True
            self._wake()
            self._go.acquire()

    def _run(self) -> None:
        _local.update = self
        self._go.acquire()
        try:
            if self._stream is None:
                self.result = self._work()
            else:
                torch.cuda.set_device(self._device)
                with torch.cuda.stream(self._stream):
                    self.result = self._work()
        except BaseException as error:
            self._error = error
        self.done = True
        self._back.release()


def yielding(original: Callable[..., Any], shadow: Callable[[Any], Any]) -> Callable[..., Any]:
    """A collective of `torch.distributed` that an update leaves to wait for by itself.

    Args:
        original: The collective.
        shadow: Gives the group to use in an update in place of a group that tasks use too: their
            order in it must be the same on all ranks, and an update comes between other tasks on
            each.
    """

    def collective(*args: Any, **named: Any) -> Any:
        update = current()
        if update is None:
            return original(*args, **named)
        if named.get("group") is not None:
            named["group"] = shadow(named["group"])
        if _is_coalescing(named.get("group")):
            return original(*args, **named)
        if named.get("async_op"):
            return _Handle(original(*args, **named), update)
        with update.away():
            return original(*args, **named)

    return collective


def yielding_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for PyTorch's coalescing manager, whose end waits."""

    @contextlib.contextmanager
    def coalescing(*args: Any, **named: Any) -> Iterator[Any]:
        update = current()
        manager = original(*args, **named)
        if update is None:
            with manager as handle:
                yield handle
            return
        handle = manager.__enter__()
        try:
            yield _Handle(handle, update)
        except BaseException as error:
            if not manager.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            with update.away():
                manager.__exit__(None, None, None)

    return coalescing


class _Handle:
    """A collective under way, whose end an update waits for by itself."""

    def __init__(self, work: Any, update: BackgroundUpdate) -> None:
        self._work, self._update = work, update

    def wait(self, *args: Any, **named: Any) -> Any:
        with self._update.away():
            return self._work.wait(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _is_coalescing(group: Any) -> bool:
    from torch.distributed import distributed_c10d as c10d

    group = group if group is not None else c10d._get_default_group()
    return group in c10d._world.pg_coalesce_state
