"""What every transport must do, checked on real processes for each of them.

NCCL needs GPUs. Its transport is tested here with groups of gloo in the role of its tensor
channels: all of the code but the communicators' own.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext.pipeline.task import HEADER_BYTES, Header
from megatron_ext.pipeline.transport.base import DTYPE_CODES, TransportError
from tests.pipeline.transport.links import (
    BACKWARD,
    CAPACITY,
    FORWARD,
    Stage,
    made_up,
    open_stage,
    same,
)
from tests.ranks import check_ranks, run_ranks

pytestmark = pytest.mark.multiprocess

TRANSPORTS = [
    "gloo",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(
            not importlib.util.find_spec("nixl"),
            reason="nixl is not installed: pip install megatron_ext[nixl]",
        ),
    ),
    "nccl",
]
DEPTH = 3

# What a peer's death takes at most to be reported, with processes competing for the cores.
FOUND_S = 5.0


# Checks of a healthy pipeline. They run one after the other in the same processes, and each
# leaves the links drained.


def check_any_order(stage: Stage) -> None:
    """Both directions at once, several chunks, any order, consumed late, shapes that vary."""
    tasks = [(microbatch, chunk) for microbatch in range(8) for chunk in range(3)]

    def content(sender: int, direction: int, microbatch: int, chunk: int) -> torch.Tensor:
        rows = 1 + (7 * microbatch + 3 * chunk) % 11
        data = made_up(rows * 4 * 1024 * (1 + 30 * (microbatch % 2)), sender, direction, microbatch)
        return (data.view(torch.int32) + chunk).view(rows, -1)

    order = random.Random(stage.rank)
    outgoing = [(direction, *task) for direction in stage.destinations for task in tasks]
    order.shuffle(outgoing)
    for direction in stage.sources:
        stage.links.expect(direction, len(tasks))
    for direction, microbatch, chunk in outgoing:
        tensor = content(stage.rank, direction, microbatch, chunk)
        stage.send(direction, microbatch, tensor, chunk)

    awaited = {(direction, *task) for direction in stage.sources for task in tasks}
    kept, unconsumed = [], []
    while awaited:
        while message := stage.links.take():
            header = message.header
            awaited.remove((header.direction, header.microbatch, header.chunk))
            kept.append(message)
            unconsumed.append(header.direction)
        order.shuffle(unconsumed)
        if unconsumed:
            stage.links.consumed(unconsumed.pop())
        elif awaited:
            assert stage.links.wait(20)
    for direction in unconsumed:
        stage.links.consumed(direction)
    assert stage.links.take() is None
    # Only now: a later message must not have overwritten an earlier one.
    for header, tensor, _ in kept:
        sender = stage.sources[header.direction]
        expected = content(sender, header.direction, header.microbatch, header.chunk)
        assert same(tensor, expected), header
    assert stage.links.flush(20)


def check_bounded_buffers(stage: Stage) -> None:
    """A receiver that consumes nothing stops its sender, whose compute thread goes on."""
    count, before = 3 * CAPACITY, 0
    if stage.rank == 0:
        tensors = [made_up(1 << 20, microbatch) for microbatch in range(count)]
        before = stage.links.sent(FORWARD)
        stage.links.report_sent(True)
        seconds = []
        for microbatch, tensor in enumerate(tensors):
            started = time.perf_counter()
            stage.send(FORWARD, microbatch, tensor)
            seconds.append(time.perf_counter() - started)
        assert sorted(seconds)[count // 2] < 0.005, seconds
        assert sum(seconds) < 0.5, seconds
        time.sleep(0.2)
        assert stage.links.sent(FORWARD) == before, "something was taken that nobody expects"
    dist.barrier()
    if stage.rank == 1:
        stage.links.expect(FORWARD, count)
    if stage.rank == 0:
        stage.until(lambda: stage.links.sent(FORWARD) == before + CAPACITY)
        time.sleep(0.2)
        assert stage.links.sent(FORWARD) == before + CAPACITY, "more than there are buffers"
        assert not stage.links.flush(0.1)
    dist.barrier()
    if stage.rank == 1:
        arrived = []
        while len(arrived) < CAPACITY:
            assert stage.links.wait(20)
            while message := stage.links.take():
                arrived.append(message)
        stage.links.consumed(FORWARD)
    if stage.rank == 0:
        stage.until(lambda: stage.links.sent(FORWARD) == before + CAPACITY + 1)
        time.sleep(0.2)
        assert stage.links.sent(FORWARD) == before + CAPACITY + 1, "one buffer was freed"
    dist.barrier()
    if stage.rank == 1:
        for _ in range(CAPACITY - 1):
            stage.links.consumed(FORWARD)
        arrived += stage.receive(count - CAPACITY)
        for header, tensor, _ in arrived:
            assert same(tensor, made_up(1 << 20, header.microbatch))
    assert stage.links.flush(20)
    assert stage.links.sent(FORWARD) == before + count if stage.rank == 0 else True
    stage.links.report_sent(False)


def check_any_size(stage: Stage) -> None:
    """Large, tiny, empty and absent tensors, in sizes that grow and shrink."""
    kib, mib = 1 << 10, 1 << 20
    sizes = [64 * mib, 1, 64 * kib, 64 * kib + 1, mib, 2 * mib, 2 * mib, 300 * kib, 8 * mib + 3]
    tensors: list[torch.Tensor | None] = [made_up(size, size) for size in sizes]
    tensors[2:2] = [None, torch.empty(0), torch.empty(3, 0, 5, dtype=torch.int64)]
    tensors += [torch.tensor(1.5), torch.ones(1, 1, 1, 1, 1, 1, 1, 1)]
    _pass_on(stage, tensors)


def check_every_type(stage: Stage) -> None:
    """Every type that a header can name, and in it every bit pattern of two bytes."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    tensors = []
    for dtype in DTYPE_CODES:
        if dtype is torch.bool:
            tensors.append(made_up(999, "bool") > 100)
        else:
            tensors.append(patterns.view(dtype) if dtype.itemsize <= 2 else patterns.to(dtype))
    _pass_on(stage, tensors)


def check_any_layout(stage: Stage) -> None:
    """Tensors whose elements do not follow each other in memory."""
    matrix = made_up(96 * 1024, "matrix").view(64, 12, -1)
    large = made_up(3 << 20, "large").view(1024, -1)
    tensors = [
        matrix.transpose(0, 2),
        matrix[::3, 1:7:2],
        matrix[5],
        large.t(),
        large[:, 1::2],
        made_up(16, "row").expand(5000, 16),
    ]
    _pass_on(stage, tensors)


def check_waiting(stage: Stage) -> None:
    """`wait` ends for an arrival, and for a message that was taken only if asked to."""
    links = stage.links
    assert links.take() is None
    assert not links.wait(0.01)
    assert links.flush(0.01), "nothing is queued"
    dist.barrier()
    if stage.rank == 0:
        before = links.sent(FORWARD)
        stage.send(FORWARD, 0, torch.ones(3))
        assert not links.wait(0.3), "taken messages are not reported now"
        assert links.sent(FORWARD) == before + 1
        links.report_sent(True)
        stage.send(FORWARD, 1, torch.ones(3))
        assert links.wait(20)
        assert links.take() is None
        assert links.sent(FORWARD) == before + 2
        links.report_sent(False)
    if stage.rank == 1:
        links.expect(FORWARD, 1)
        links.expect(FORWARD, 1)
        assert [message.header.microbatch for message in stage.receive(2)] == [0, 1]
        assert links.take() is None
        assert not links.wait(0.01)
    dist.barrier()


def check_close(stage: Stage) -> None:
    """Closing ends the threads. The last check: the links are gone then."""
    dist.barrier()  # no message is under way
    assert _threads()
    stage.links.close()
    deadline = time.monotonic() + 5
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _threads()


CHECKS: dict[str, Callable[[Stage], None]] = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_") and name != "check_ranks"
}


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcomes(transport: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """For every check, what each rank says of it: "ok", an error, or nothing if not reached."""
    folder = tmp_path_factory.mktemp(transport)
    ranks = run_ranks(DEPTH, _run_checks, transport, str(folder), timeout_s=60)
    outcomes = {}
    for name in CHECKS:
        files = [folder / f"{name}.{rank}" for rank in range(DEPTH)]
        outcomes[name] = [file.read_text() if file.exists() else "" for file in files]
    if not any(text for texts in outcomes.values() for text in texts):
        check_ranks(ranks)
    return outcomes


@pytest.mark.parametrize("check", CHECKS)
def test_healthy_pipeline(outcomes: dict[str, list[str]], check: str) -> None:
    texts = outcomes[check]
    assert texts == ["ok"] * DEPTH, "\n".join(text or "(not finished)" for text in texts)


def test_ring_of_two(transport: str) -> None:
    """Two stages that feed each other in both directions, as with virtual stages."""
    check_ranks(run_ranks(2, _run_ring, transport, timeout_s=60))


def test_death_of_a_peer(transport: str) -> None:
    """A stage dies: who waits for it is told, and who sends to it."""
    dying, *others = run_ranks(DEPTH, _lose_first_stage, transport, timeout_s=60)
    assert dying.exit_code == -signal.SIGKILL
    check_ranks(others)
    first, dying, last = run_ranks(DEPTH, _lose_middle_stage, transport, timeout_s=60)
    assert dying.exit_code == -signal.SIGKILL
    check_ranks([first, last])


def test_malformed_header(transport: str, tmp_path: Path) -> None:
    """Bytes that are no header break the link, and are not unpickled."""
    check_ranks(run_ranks(2, _send_malformed_header, transport, str(tmp_path), timeout_s=60))
    assert not list(tmp_path.iterdir())


def _run_checks(rank: int, kind: str, folder: str) -> None:
    stage = open_stage(kind, rank, DEPTH)
    for name, check in CHECKS.items():
        dist.barrier()
        try:
            check(stage)
        except BaseException:
            (Path(folder) / f"{name}.{rank}").write_text(traceback.format_exc())
            raise
        (Path(folder) / f"{name}.{rank}").write_text("ok")
    dist.barrier()


def _pass_on(stage: Stage, tensors: list[torch.Tensor | None]) -> None:
    """The first stage sends all tensors, every other one passes on what it got, and checks it."""
    if stage.rank == 0:
        for microbatch, tensor in enumerate(tensors):
            stage.send(FORWARD, microbatch, tensor)
    else:
        stage.links.expect(FORWARD, len(tensors))
        for _ in tensors:
            ((header, tensor, _),) = stage.receive(1)
            expected = tensors[header.microbatch]
            assert same(tensor, expected), (header, expected)
            if stage.rank < stage.depth - 1:
                stage.send(FORWARD, header.microbatch, tensor)
    assert stage.links.flush(20)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rrfp-")]


def _run_ring(rank: int, kind: str) -> None:
    stage = open_stage(kind, rank, 2, ring=True)
    for direction in (FORWARD, BACKWARD):
        stage.links.expect(direction, 10)
        for microbatch in range(10):
            stage.send(direction, microbatch, made_up(100_000, rank, direction, microbatch))
    for header, tensor, _ in stage.receive(20):
        assert same(tensor, made_up(100_000, 1 - rank, header.direction, header.microbatch))
    assert stage.links.flush(20)
    dist.barrier()


def _lose_first_stage(rank: int, kind: str) -> None:
    """The first stage dies while the second one only waits, and when it wants nothing."""
    stage = open_stage(kind, rank, DEPTH)
    dist.barrier()
    if rank == 2:
        return
    if rank == 0:
        stage.send(FORWARD, 0, torch.ones(4))
        assert stage.links.flush(20)
        os.kill(os.getpid(), signal.SIGKILL)
    stage.links.expect(FORWARD, 1)
    (message,) = stage.receive(1)
    assert same(message.tensor, torch.ones(4))
    assert not stage.links.wait(1.0), "nothing is expected of the dead stage"
    assert stage.links.take() is None
    stage.links.expect(FORWARD, 1)
    error = _broken(stage)
    assert (error.peer, error.direction, error.sending) == (0, FORWARD, False)


def _lose_middle_stage(rank: int, kind: str) -> None:
    """The middle stage dies while the first one sends to it and the last one waits for it."""
    stage = open_stage(kind, rank, DEPTH)
    if rank == 2:
        stage.links.expect(FORWARD, 1)
    if rank == 0:
        for microbatch in range(3):
            stage.send(FORWARD, microbatch, torch.ones(1 << 18))
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    error = _broken(stage, flush=rank == 0)
    assert (error.peer, error.direction, error.sending) == (1, FORWARD, rank == 0)


def _broken(stage: Stage, *, flush: bool = False) -> TransportError:
    """The error that ends a wait in time."""
    started = time.monotonic()
    with pytest.raises(TransportError) as caught:
        assert stage.links.flush(20) if flush else stage.links.wait(20), "nothing was reported"
    assert time.monotonic() - started < FOUND_S, caught.value
    assert str(caught.value)
    with pytest.raises(TransportError):  # and it stays broken
        stage.links.take()
    return caught.value


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> object:
        return os.mkdir, ("unpickled",)


def _send_malformed_header(rank: int, kind: str, folder: str) -> None:
    os.chdir(folder)
    stage = open_stage(kind, rank, 2)
    if rank == 0:
        Header.pack = lambda self: pickle.dumps(_Bomb()).ljust(HEADER_BYTES, b"\0")  # type: ignore
        stage.send(FORWARD, 0, torch.ones(3))
        dist.barrier()
        return
    stage.links.expect(FORWARD, 1)
    error = _broken(stage)
    assert (error.peer, error.direction, error.sending) == (0, FORWARD, False)
    assert "a header starts with" in str(error)
    dist.barrier()
