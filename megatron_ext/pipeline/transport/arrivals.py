"""Hands what has arrived from the threads of a transport to the compute thread."""

from __future__ import annotations

import contextlib
import threading
import time
from queue import Empty, SimpleQueue


class Arrivals[Item]:
    """A queue from any threads to one, which may wait for the next item for a limited time.

    `SimpleQueue.get` has a time limit too, but not a dependable one: where the limit passes after
    it has looked and before it sleeps, CPython (3.12.1) sleeps for ever. A rank that shares its
    tasks waits like this thousands of times a second, which would hang a run now and then. So
    items go through a `SimpleQueue`, and the waiting is done on a lock that is held until
    something comes. `queue.Queue` does the same at about twice the cost.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._bell = threading.Lock()
        self._bell.acquire()

    def put(self, item: Item) -> None:
        """Add an item; any thread may call this."""
        self._items.put(item)
        with contextlib.suppress(RuntimeError):  # it may ring already
            self._bell.release()

    def empty(self) -> bool:
        """Whether there is nothing."""
        return self._items.empty()

    def get(self, seconds: float) -> Item:
        """Take the next item, waiting for it if there is none.

        Args:
            seconds: Longest time to wait.

        Raises:
            queue.Empty: There was none in that time.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                return self._items.get_nowait()
            except Empty:
                left = until - time.monotonic()
                if left <= 0:
                    raise
            self._bell.acquire(timeout=left)  # it may ring for an item that is taken already
