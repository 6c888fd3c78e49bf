"""Injected delays: the recipe, the same tasks for every schedule, and unchanged results."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.errors import UsageError
from megatron_ext.pipeline import jitter
from megatron_ext.pipeline.jitter import Jitter, JitterConfig
from megatron_ext.pipeline.task import Kind, Task
from tests.training import RRFP, train, train_well

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD


class FakeStopwatch:
    """Every task takes `seconds`; waits are noted."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.waits: list[float] = []

    def start(self) -> None: ...

    def stop(self, started: None, report: Callable[[float], None]) -> None:
        report(self.seconds)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


def make(config: JitterConfig, *, stage: int = 0, iteration: int = 0, **named: Any) -> Jitter:
    named.setdefault("stopwatch", FakeStopwatch())
    return Jitter(config, stage=stage, iteration=lambda: iteration, **named)


def test_forms() -> None:
    assert JitterConfig.parse("0.2,10,1.0") == jitter.LEVELS["J2"]
    assert JitterConfig.parse("1,0,.5,7") == JitterConfig(1, 0, 0.5, seed=7)
    assert str(JitterConfig.parse("0.1,5,0.5,3")) == "0.1,5,0.5,3"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"is not P,BASE_MS,ALPHA\[,SEED\]"),
        ("0.2,10", r"is not P,BASE_MS,ALPHA"),
        ("0.2,10,1,2,3", r"is not P,BASE_MS,ALPHA"),
        ("0.2,ten,1", r"is not P,BASE_MS,ALPHA"),
        ("0.2,10,1,0.5", r"is not P,BASE_MS,ALPHA"),
        ("2,10,1", "probability 2 is not between 0 and 1"),
        ("nan,10,1", "probability nan is not between 0 and 1"),
        ("0.2,-1,1", "base -1 is negative or infinite"),
        ("0.2,10,inf", "alpha inf is negative or infinite"),
    ],
)
def test_other_forms_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        JitterConfig.parse(text)


def test_the_recipe() -> None:
    delays = make(JitterConfig(1, 10, 2))
    task = Task(FORWARD, 3)
    delays.learn(task, 0.100)
    delays.learn(task, 0.200)
    average = 0.9 * 0.100 + 0.1 * 0.200
    assert 0.5 * 2 * average <= delays.delay_s(task) < 1.5 * 2 * average
    # Another kind of task has an average of its own; what is shorter than the base counts as it.
    other = Task(BACKWARD, 3)
    delays.learn(other, 0.001)
    assert 0.5 * 2 * 0.010 <= delays.delay_s(other) < 1.5 * 2 * 0.010


def test_draws_have_the_stated_laws() -> None:
    delays = make(JitterConfig(0.3, 1, 1))
    drawn = [delays.delay_s(Task(FORWARD, number)) for number in range(4000)]
    delayed = [seconds * 1e3 for seconds in drawn if seconds]
    assert 0.27 < len(delayed) / len(drawn) < 0.33
    assert 0.5 <= min(delayed) < 0.51
    assert 1.49 < max(delayed) < 1.5
    assert 0.97 < statistics.fmean(delayed) < 1.03


def test_a_draw_depends_on_the_task_and_its_place_only() -> None:
    config = JitterConfig(0.5, 10, 1)
    tasks = [
        Task(kind, number, chunk) for kind in (0, 1) for number in range(9) for chunk in (0, 1)
    ]
    tasks = [Task(Kind(kind), number, chunk) for kind, number, chunk in tasks]
    delays = make(config)
    there = [delays.delay_s(task) for task in tasks]
    back = [delays.delay_s(task) for task in reversed(tasks)]
    assert there == back[::-1] == [make(config).delay_s(task) for task in tasks]
    assert 0 < sum(seconds == 0 for seconds in there) < len(there)
    others = [
        make(JitterConfig(0.5, 10, 1, seed=1)),
        make(config, stage=1),
        make(config, replica=1),
        make(config, iteration=1),
    ]
    for other in others:
        assert [other.delay_s(task) for task in tasks] != there
    usual = [delays.delay_s(Task(FORWARD, number)) for number in range(9)]
    assert usual != [delays.delay_s(Task(BACKWARD, number)) for number in range(9)]
    assert usual != [delays.delay_s(Task(FORWARD, number, 1)) for number in range(9)]


def test_a_split_backward_is_delayed_like_a_whole_one() -> None:
    config = JitterConfig(1, 0, 1)
    whole, split = make(config), make(config)
    whole.learn(Task(BACKWARD, 0), 0.008)
    split.learn(Task(BACKWARD, 0), 0.005)
    second_half = Task(Kind.WEIGHT, 0)
    split.learn(second_half, 0.003)
    assert split.delay_s(Task(BACKWARD, 1)) == pytest.approx(whole.delay_s(Task(BACKWARD, 1)))
    assert split.delay_s(second_half) == 0


def test_the_delay_comes_after_the_task_and_counts_its_time() -> None:
    stopwatch = FakeStopwatch(0.040)
    delays = make(JitterConfig(1, 10, 1), stopwatch=stopwatch)
    with delays.around(Task(FORWARD, 0)):
        assert stopwatch.waits == []
    (seconds,) = stopwatch.waits
    assert 0.020 <= seconds < 0.060


def test_on_the_host_a_delay_is_a_sleep() -> None:
    stopwatch = jitter.HostStopwatch()
    times: list[float] = []
    started = stopwatch.start()
    stopwatch.wait(0.02)
    stopwatch.stop(started, times.append)
    assert 0.02 <= times[0] < 0.2


class FakeEvent:
    """An event on a device whose clock is the host's; it has been reached once `reached` says."""

    reached = True

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return FakeEvent.reached

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


def test_on_a_device_times_come_when_it_got_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logic only: a stand-in for CUDA takes the place of a GPU."""
    cycles_per_s = 1e9
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    sleep = lambda cycles: time.sleep(cycles / cycles_per_s)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_sleep", sleep, raising=False)
    stopwatch = jitter.DeviceStopwatch()
    times: list[float] = []

    def measure(seconds: float) -> None:
        started = stopwatch.start()
        stopwatch.wait(seconds)
        stopwatch.stop(started, times.append)

    monkeypatch.setattr(FakeEvent, "reached", False)
    measure(0.01)
    assert times == []
    monkeypatch.setattr(FakeEvent, "reached", True)
    measure(0.02)
    assert times == [pytest.approx(0.01, rel=0.5), pytest.approx(0.02, rel=0.5)]


def _forward_step(
    func: Any, model: Any, current_microbatch: Any = None, vp_stage: Any = None
) -> Any:
    return torch.zeros(3), torch.tensor(1)


def _backward_step(input_tensor: Any, output_tensor: Any, gradient: Any, config: Any) -> Any:
    return None


def test_steps_know_their_task() -> None:
    seen: list[Task] = []
    delays = make(JitterConfig(0, 0, 0))
    delays.delay_s = lambda task: seen.append(task) or 0.0  # type: ignore
    forward = jitter.jittered_forward_step(_forward_step, lambda: delays)
    backward = jitter.jittered_backward_step(_backward_step, lambda: delays)
    first, _ = forward(None, None, current_microbatch=4)
    second, _ = forward(None, None, 5, vp_stage=1)
    backward(None, second, None, None)
    backward(None, [first], None, config=None)
    assert seen == [
        Task(FORWARD, 4),
        Task(FORWARD, 5, 1),
        Task(BACKWARD, 5, 1),
        Task(BACKWARD, 4),
    ]
    with pytest.raises(UsageError, match="--rrfp-jitter: this schedule does not number"):
        forward(None, None)
    with pytest.raises(UsageError, match="--rrfp-jitter: this schedule runs a backward without"):
        backward(None, torch.zeros(1), None, None)


# Real trainings.

PP2 = shlex.split("--pipeline-model-parallel-size 2")
JITTER = ["--rrfp-jitter", "0.5,2,1,9"]


def _record_draws(record: dict[str, Any]) -> None:
    """Keep which tasks were delayed."""
    delay_s = Jitter.delay_s
    record["draws"] = []

    def recording(self: Jitter, task: Task) -> float:
        seconds = delay_s(self, task)
        if task[0] in (FORWARD, BACKWARD):
            record["draws"].append([self._iteration(), *task, seconds > 0])
        return seconds

    Jitter.delay_s = recording  # type: ignore[method-assign]


@pytest.mark.multiprocess
def test_every_schedule_meets_the_same_delays_and_results_stay(corpus: Path) -> None:
    plain = train_well(corpus, 2, PP2, observe=_record_draws)
    megatron = train_well(corpus, 2, [*PP2, *JITTER], observe=_record_draws)
    rrfp = train_well(corpus, 2, [*PP2, *RRFP, *JITTER], observe=_record_draws)
    for one, two, three in zip(plain, megatron, rrfp, strict=True):
        assert one["draws"] == []
        assert sorted(two["draws"]) == sorted(three["draws"])
        assert len(two["draws"]) == 3 * 2 * 8
        assert 0 < sum(delayed for *_, delayed in two["draws"]) < len(two["draws"])
        assert one["steps"] == two["steps"] == three["steps"]
        assert one["weights"] == two["weights"] == three["weights"]
        steps = {hook.rpartition(".")[2] for hook in set(two["hooks"]) - set(one["hooks"])}
        assert steps == {"forward_step", "backward_step"}
    first, last = (sorted(record["draws"]) for record in megatron)
    assert first != last


@pytest.mark.multiprocess
def test_a_malformed_flag_ends_the_run(corpus: Path) -> None:
    ranks, _ = train(corpus, 2, [*PP2, "--rrfp-jitter", "0.5,2"])
    for rank in ranks:
        assert rank.exit_code == 2
        assert "--rrfp-jitter: '0.5,2' is not P,BASE_MS,ALPHA[,SEED]" in rank.error_line
