"""One task queued behind the running one, on a GPU and a clock that are made up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron_ext.pipeline import device_queue
from megatron_ext.pipeline.batch_statistics import BatchStatistics
from megatron_ext.pipeline.device_queue import DeviceQueue, DeviceStuckError
from megatron_ext.pipeline.task import Kind, Task
from megatron_ext.pipeline.trace import RankPlace, batch_events

GPU = torch.device("cuda", 0)
TASKS = [Task(Kind.FORWARD, microbatch, 0) for microbatch in range(6)]


class Machine:
    """A host whose time passes when it sleeps, and a GPU that runs what is enqueued in turn."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free_at = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def enqueue(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def event(self, enable_timing: bool = False) -> Any:
        return Event(self)


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self.machine.free_at, self.machine.now)

    def query(self) -> bool:
        return self.machine.now >= self.at

    def synchronize(self) -> None:
        self.machine.now = max(self.machine.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(device_queue, "time", machine)
    return machine


def test_at_most_one_task_waits_behind_the_running_one(machine: Machine) -> None:
    queue = DeviceQueue(GPU, 10, machine.event)
    queue.begin_batch(timed=True)
    chosen = []
    for task in TASKS:
        queue.wait_for_room()
        chosen.append(machine.now)
        with queue.running(task):
            machine.enqueue(0.02)
    spans = queue.spans()
    assert [span.task for span in spans] == TASKS
    for number, at in enumerate(chosen):  # when a task was chosen, one at most was unfinished
        unfinished = sum(span.ended > at for span in spans[:number])
        assert unfinished == min(number, 1)
    # And the GPU never waited for the host, but for the first one.
    for before, after in itertools.pairwise(spans):
        assert after.started == pytest.approx(before.ended)
        assert after.ended - after.started == pytest.approx(0.02)


def test_times_are_kept_only_where_asked(machine: Machine) -> None:
    queue = DeviceQueue(GPU, 10, machine.event)
    queue.begin_batch(timed=False)
    with queue.running(TASKS[0]):
        machine.enqueue(0.001)
    assert queue.spans() == []


def test_a_task_that_hangs_on_the_device_is_named(machine: Machine) -> None:
    queue = DeviceQueue(GPU, 2, machine.event)
    queue.begin_batch(timed=False)
    for task in TASKS[:2]:
        queue.wait_for_room()
        with queue.running(task):
            machine.enqueue(60)
    with pytest.raises(DeviceStuckError, match="forward of microbatch 0"):
        queue.wait_for_room()
    assert machine.now == pytest.approx(102, abs=0.01)


def test_the_cpu_needs_no_events() -> None:
    def event(**_: object) -> Any:
        raise AssertionError("made an event")

    queue = DeviceQueue(torch.device("cpu"), 1, event)
    queue.begin_batch(timed=True)
    for task in TASKS:
        queue.wait_for_room()
        with queue.running(task):
            pass
    assert queue.spans() == []


def test_a_trace_shows_what_the_device_ran(machine: Machine) -> None:
    queue = DeviceQueue(GPU, 10, machine.event)
    queue.begin_batch(timed=True)
    with queue.running(TASKS[0]):
        machine.enqueue(0.02)
    statistics = BatchStatistics(False)
    statistics.started, statistics.ended = 100.0, 100.1
    place = RankPlace(0, 1, 0, [0])
    assert not any('"device"' in line for line in batch_events(statistics, place))
    statistics.device_tasks = queue.spans()
    lines = [line for line in batch_events(statistics, place) if '"device"' in line]
    assert sum('"ph": "M"' in line for line in lines) == 1  # the track has a name
    (task,) = (line for line in lines if '"ph":"X"' in line)
    assert '"name":"F 0"' in task
    assert '"ts":100000000.000,"dur":20000.000' in task
