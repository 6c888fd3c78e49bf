"""Nothing is lost between threads, and a wait ends when its time is up."""

from __future__ import annotations

import threading
import time
from queue import Empty

import pytest

from megatron_ext.pipeline.transport.arrivals import Arrivals


@pytest.mark.timeout(60)
def test_a_wait_that_is_over_before_it_began_ends() -> None:
    arrivals = Arrivals[int]()
    for number in range(100_000):  # SimpleQueue's own limit hangs within some ten thousand
        arrivals.put(number)
        assert arrivals.get(0) == number
        with pytest.raises(Empty):
            arrivals.get(1e-6)


def test_a_wait_takes_its_time_and_no_more() -> None:
    arrivals = Arrivals[int]()
    arrivals.put(1)
    assert arrivals.get(10) == 1  # leaves the bell ringing
    started = time.monotonic()
    with pytest.raises(Empty):
        arrivals.get(0.2)
    assert 0.2 <= time.monotonic() - started < 2
    threading.Timer(0.1, arrivals.put, [2]).start()
    assert arrivals.get(30) == 2
    assert time.monotonic() - started < 10
    assert arrivals.empty()


def test_every_item_of_every_thread_comes_once_and_in_its_order() -> None:
    arrivals = Arrivals[tuple[int, int]]()
    threads = [
        threading.Thread(target=lambda n=n: [arrivals.put((n, i)) for i in range(20_000)])  # type: ignore[misc]
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    got: dict[int, list[int]] = {n: [] for n in range(4)}
    for _ in range(4 * 20_000):
        number, item = arrivals.get(30)
        got[number].append(item)
    assert all(items == list(range(20_000)) for items in got.values())
    assert arrivals.empty()
