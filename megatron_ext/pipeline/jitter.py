"""Injected delays: a noisy machine that is equally noisy for every schedule under test.

The recipe is that of RRFP's evaluation. After a task, with probability P, its stage waits for
``ALPHA * max(BASE, e) * (0.5 + r)``, where r is uniform in [0, 1) and e is the exponential
average ``e = 0.9 e + 0.1 c`` over the times c of such tasks. Which tasks are delayed, and r,
depend on the task alone, not on when a schedule runs it.

Only forwards and backwards are delayed. A backward that is split counts as one: its delay goes
with its first half, from the time that both halves take, so that a schedule gains nothing by
splitting. What is computed never changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.task import Kind, Task

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD

_KEEP = 0.9  # of the average, at every new time


@dataclass(frozen=True)
class JitterConfig:
    """How much to delay; the levels of RRFP's evaluation are in `LEVELS`."""

    probability: float
    base_ms: float
    alpha: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"the probability {self.probability:g} is not between 0 and 1")
        for name, value in (("base", self.base_ms), ("alpha", self.alpha)):
            if not 0 <= value < math.inf:
                raise ValueError(f"the {name} {value:g} is negative or infinite")

    @staticmethod
    def parse(text: str) -> JitterConfig:
        """Turn ``P,BASE_MS,ALPHA`` or ``P,BASE_MS,ALPHA,SEED`` into a config.

        Raises:
            ValueError: `text` has another form, or a number is out of range.
        """
        form = f"{text!r} is not P,BASE_MS,ALPHA[,SEED], such as 0.2,10,1.0"
        words = text.split(",")
        if not 3 <= len(words) <= 4:
            raise ValueError(form)
        try:
            probability, base_ms, alpha = (float(word) for word in words[:3])
            seed = int(words[3]) if len(words) == 4 else 0
        except ValueError:
            raise ValueError(form) from None
        try:
            return JitterConfig(probability, base_ms, alpha, seed)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None

    def __str__(self) -> str:
        return f"{self.probability:g},{self.base_ms:g},{self.alpha:g},{self.seed}"


LEVELS = {
    "J0": JitterConfig(0, 0, 0),
    "J1": JitterConfig(0.1, 5, 0.5),
    "J2": JitterConfig(0.2, 10, 1.0),
    "J3": JitterConfig(0.3, 15, 1.5),
}
"""RRFP, Table 6."""


class Stopwatch(Protocol):
    """Times tasks and delays them, where they run."""

    def start(self) -> Any:
        """Begin to time a task."""

    def stop(self, started: Any, report: Callable[[float], None]) -> None:
        """End it; `report` gets its seconds, at once or when they are known."""

    def wait(self, seconds: float) -> None:
        """Keep the stage from going on for so long."""


class HostStopwatch:
    """For tasks on the CPU."""

    def start(self) -> float:
        """The time now."""
        return time.perf_counter()

    def stop(self, started: float, report: Callable[[float], None]) -> None:
        """Report at once."""
        report(time.perf_counter() - started)

    def wait(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class DeviceStopwatch:
    """For tasks on a GPU: nothing here makes the host wait for the device.

    Times are those between two events on the stream; they are reported a task or two later, when
    the device has got there. Delays are waits on the stream, so that everything behind them,
    sending the result included, is late.
    """

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._pending: deque[tuple[Any, Any, Callable[[float], None]]] = deque()
        self._cycles_per_s = self._calibrate()

    def start(self) -> Any:
        """An event on the stream."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, started: Any, report: Callable[[float], None]) -> None:
        """Report this task once it is done, and now those that are."""
        self._pending.append((started, self.start(), report))
        while self._pending and self._pending[0][1].query():
            begin, end, tell = self._pending.popleft()
            tell(begin.elapsed_time(end) * 1e-3)

    def wait(self, seconds: float) -> None:
        """Let the stream spin."""
        self._cuda._sleep(int(seconds * self._cycles_per_s))

    def _calibrate(self, cycles: int = 20_000_000) -> float:
        self._cuda._sleep(cycles)  # wakes the device's clock up
        begin = self.start()
        self._cuda._sleep(cycles)
        end = self.start()
        end.synchronize()
        return float(cycles / (begin.elapsed_time(end) * 1e-3))


class Jitter:
    """The delays of one stage.

    Args:
        config: How much.
        stage: Number of the pipeline stage; each has its own sequence.
        replica: Data-parallel rank; each has its own sequence too.
        iteration: Gives the number of the training iteration under way.
        stopwatch: Where the tasks run.
    """

    def __init__(
        self,
        config: JitterConfig,
        *,
        stage: int,
        replica: int = 0,
        iteration: Callable[[], int],
        stopwatch: Stopwatch,
    ) -> None:
        self.config = config
        self._place = f"{config.seed} {stage} {replica}"
        self._iteration = iteration
        self._stopwatch = stopwatch
        self._averages: dict[tuple[int, int], float] = {}
        """By kind and chunk."""

    @contextlib.contextmanager
    def around(self, task: Task) -> Iterator[None]:
        """Time the body, which computes `task`, and delay its end."""
        started = self._stopwatch.start()
        yield
        self._stopwatch.stop(started, partial(self.learn, task))
        seconds = self.delay_s(task)
        if seconds > 0:
            self._stopwatch.wait(seconds)

    def learn(self, task: Task, seconds: float) -> None:
        """Take the time of one task into the average over its kind."""
        kind = (task[0], task.chunk)
        average = self._averages.get(kind, seconds)  # the first one is the average
        self._averages[kind] = _KEEP * average + (1 - _KEEP) * seconds

    def delay_s(self, task: Task) -> float:
        """How long to delay `task`, in seconds; 0 for most tasks."""
        kind, _, chunk = task
        if kind not in (FORWARD, BACKWARD):
            return 0.0
        chance, r = self._draw(task)
        if chance >= self.config.probability:
            return 0.0
        average = sum(
            seconds
            for other, seconds in self._averages.items()
            if other[1] == chunk and (other[0] == FORWARD) is (kind == FORWARD)
        )
        return self.config.alpha * max(self.config.base_ms * 1e-3, average) * (0.5 + r)

    def _draw(self, task: Task) -> tuple[float, float]:
        """Two numbers in [0, 1) that depend on nothing but the task and its place."""
        kind, microbatch, chunk = task
        key = f"{self._place} {self._iteration()} {int(kind)} {microbatch} {chunk}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        return (
            int.from_bytes(digest[:8], "little") / 2**64,
            int.from_bytes(digest[8:], "little") / 2**64,
        )


# Megatron's steps. A backward step is not told its microbatch, but gets the very tensor that the
# forward step returned: the task is written on it.
_MARK = "_megatron_ext_task"


def jittered_forward_step(
    forward_step: Callable[..., Any], jitter: Callable[[], Jitter | None]
) -> Callable[..., Any]:
    """Megatron's `forward_step` with delays.

    Args:
        forward_step: The original.
        jitter: Gives the delays of this stage, at every step; None for none.
    """
    signature = inspect.signature(forward_step)

    def jittered(*args: Any, **named: Any) -> Any:
        delays = jitter()
        if delays is None:
            return forward_step(*args, **named)
        values = signature.bind(*args, **named).arguments
        microbatch = values.get("current_microbatch")
        if microbatch is None:
            raise UsageError(
                "--rrfp-jitter: this schedule does not number its microbatches; "
                "leave --rrfp-jitter out"
            )
        task = Task(FORWARD, microbatch, values.get("vp_stage") or 0)
        with delays.around(task):
            result = forward_step(*args, **named)
        setattr(_first(result[0]), _MARK, task)
        return result

    return jittered


def jittered_backward_step(
    backward_step: Callable[..., Any], jitter: Callable[[], Jitter | None]
) -> Callable[..., Any]:
    """Megatron's `backward_step` with delays; see `jittered_forward_step`."""
    signature = inspect.signature(backward_step)

    def jittered(*args: Any, **named: Any) -> Any:
        delays = jitter()
        if delays is None:
            return backward_step(*args, **named)
        output = _first(signature.bind(*args, **named).arguments["output_tensor"])
        forward: Task | None = getattr(output, _MARK, None)
        if forward is None:
            raise UsageError(
                "--rrfp-jitter: this schedule runs a backward without the forward before it; "
                "leave --rrfp-jitter out"
            )
        with delays.around(Task(BACKWARD, forward.microbatch, forward.chunk)):
            return backward_step(*args, **named)

    return jittered


def _first(output: Any) -> Any:
    """The first tensor of what a forward step returns."""
    while isinstance(output, list | tuple):
        output = output[0]
    if isinstance(output, dict):
        raise UsageError(
            "--rrfp-jitter does not support multi-module pipelines; leave --rrfp-jitter out"
        )
    return output
