"""Bells between processes, here between threads of one process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ext.pipeline.transport.bell import Address, Bells, Doorway
from tests.ranks import check_ranks, run_ranks


def open_pair(
    change: Callable[[Address], Address] = lambda address: address, timeout_s: float = 10.0
) -> tuple[Bells, Bells]:
    """The bells of ranks 0 and 1, which see each other's addresses through `change`."""
    doorways = [Doorway(), Doorway()]
    addresses = [change(doorway.address) for doorway in doorways]
    with ThreadPoolExecutor(2) as threads:
        opened = [
            threads.submit(doorway.open_bells, rank, [1 - rank], addresses, timeout_s)
            for rank, doorway in enumerate(doorways)
        ]
        first, second = (future.result() for future in opened)
    return first, second


@pytest.fixture
def pair() -> Iterator[tuple[Bells, Bells]]:
    bells = open_pair()
    yield bells
    for one in bells:
        one.close()


def until(bells: Bells, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        bells.wait(0.1)
        assert time.monotonic() < deadline


def test_rings_are_counted(pair: tuple[Bells, Bells]) -> None:
    first, second = pair
    first.wait(0.01)
    assert not first.watchful
    second.ring(0)
    second.ring(0)
    until(first, lambda: first.ringing[1] == 2)
    assert first.watchful
    first.ringing[1] -= 2
    assert not first.watchful


def test_work_under_way_is_watched_until_it_has_ended(pair: tuple[Bells, Bells]) -> None:
    first, second = pair
    second.started(0)
    until(first, lambda: first.watchful)
    assert first.ringing[1] == 0
    second.ended(0)
    until(first, lambda: first.ringing[1] == 1)
    first.ringing[1] -= 1
    assert not first.watchful


def test_another_thread_can_wake(pair: tuple[Bells, Bells]) -> None:
    first, _ = pair
    threading.Timer(0.1, first.wake).start()
    started = time.monotonic()
    first.wait(2.0)
    assert time.monotonic() - started < 1.5
    first.close()
    first.wake()  # too late, and harmless


def test_a_closed_connection_is_a_lost_neighbour(pair: tuple[Bells, Bells]) -> None:
    first, second = pair
    second.ring(0)
    second.close()
    until(first, lambda: bool(first.lost))
    assert first.lost == {1: "it closed the connection"}
    assert first.awaited(1), "what it rang for may still come"
    until(first, lambda: not first.awaited(1))
    first.ring(1)  # goes nowhere, and is no error


def test_a_silent_neighbour_is_lost() -> None:
    first, second = open_pair(timeout_s=0.5)
    until(first, lambda: bool(first.lost))
    assert first.lost == {1: "nothing heard of it for 0.5 s"}
    first.close()
    second.close()


def test_neighbours_that_only_wait_are_not_lost() -> None:
    first, second = open_pair(timeout_s=1.0)
    started = time.monotonic()
    while time.monotonic() - started < 2.0:
        first.wait(0.01)
        second.wait(0.01)
    assert not first.lost
    assert not second.lost
    first.close()
    second.close()


def test_a_host_that_leads_nowhere_is_passed_over() -> None:
    first, second = open_pair(lambda a: a._replace(hosts=("host.invalid", "127.0.0.1")))
    second.ring(0)
    until(first, lambda: first.ringing[1] == 1)
    first.close()
    second.close()


def test_strangers_are_refused() -> None:
    doorway = Doorway()
    stranger = socket.create_connection(("127.0.0.1", doorway.address.port))
    stranger.sendall(bytes(20))
    other = Doorway()
    with ThreadPoolExecutor(2) as threads:
        addresses = [other.address, doorway.address]
        opened = threads.submit(doorway.open_bells, 1, [0], addresses, 10.0)
        first = threads.submit(other.open_bells, 0, [1], addresses, 10.0).result()
        second = opened.result()
    assert stranger.recv(100) == b""
    first.close()
    second.close()


def test_an_address_of_another_pipeline_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot reach stage 1 by TCP"):
        open_pair(lambda address: address._replace(token=bytes(16)), timeout_s=1.0)


@pytest.mark.multiprocess
def test_a_forked_child_does_not_keep_connections_open() -> None:
    check_ranks(run_ranks(1, _fork_and_close, timeout_s=60))


def _fork_and_close(_: int) -> None:
    first, second = open_pair()
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    second.close()
    started = time.monotonic()
    until(first, lambda: bool(first.lost))
    assert time.monotonic() - started < 3
