"""Stages whose compute is a sleep, for the benchmarks: what they do, how long, what they hold.

A rank's work is drawn once, as microbatches of one whole stage. A schedule with several chunks per
rank gets the same work in equal parts, so that every schedule sleeps equally long on every rank.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.enums import ModelType

from megatron_ext.pipeline import jitter, weight_grad
from megatron_ext.pipeline.task import Kind, Task

SEQUENCE_LENGTH, HIDDEN_SIZE = 64, 64  # a small message: 16 KiB


@dataclass(frozen=True)
class Durations:
    """Seconds of every task of a batch: arrays [stage, microbatch]."""

    forward: np.ndarray
    backward: np.ndarray

    @staticmethod
    def draw(
        forward_ms: float, backward_ms: float, sigma: float, seed: int, shape: tuple[int, int]
    ) -> Durations:
        """Lognormal times with the given means; `sigma` 0 makes them all equal."""
        generator = np.random.default_rng(seed)

        def times(mean_ms: float) -> np.ndarray:
            return mean_ms / 1e3 * generator.lognormal(-(sigma**2) / 2, sigma, shape)

        return Durations(times(forward_ms), times(backward_ms))


@dataclass(frozen=True)
class Work:
    """Seconds of every task: arrays [rank, chunk, microbatch]."""

    forward: np.ndarray
    backward: np.ndarray
    """Without the weight gradient."""
    weight: np.ndarray

    @staticmethod
    def draw(durations: Durations, level: str, seed: int, chunks: int) -> Work:
        """The stages' times and the injected delays, divided among the chunks of each rank.

        Half of a backward is the weight gradient. A delay hits one chunk of its microbatch, drawn
        at random, and of a backward the part before its result is sent.
        """
        generator = np.random.default_rng(seed)
        hit = generator.integers(chunks, size=durations.forward.shape)
        delays_f, delays_b = injected_delays(durations, level, seed)
        mask = hit[:, None, :] == np.arange(chunks)[None, :, None]

        def shared(seconds: np.ndarray) -> np.ndarray:
            return np.repeat(seconds[:, None, :] / chunks, chunks, axis=1)

        return Work(
            shared(durations.forward) + mask * delays_f[:, None, :],
            shared(durations.backward / 2) + mask * delays_b[:, None, :],
            shared(durations.backward / 2),
        )

    @staticmethod
    def nothing(ranks: int, chunks: int, microbatches: int) -> Work:
        """Tasks that take no time: to connect and warm up."""
        none = np.zeros((ranks, chunks, microbatches))
        return Work(none, none, none)

    def times(self, rank: int, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of a chunk's forwards, backwards and weight gradients, by microbatch."""
        forward, backward, weight = (
            part[rank, chunk] for part in (self.forward, self.backward, self.weight)
        )
        return forward, backward, weight

    def of_rank(self, rank: int) -> float:
        """Seconds that a rank sleeps in one batch."""
        return float(sum(part[rank].sum() for part in (self.forward, self.backward, self.weight)))

    @property
    def floor(self) -> float:
        """Work of the busiest rank, in seconds: no schedule is faster."""
        return max(self.of_rank(rank) for rank in range(len(self.forward)))


def injected_delays(durations: Durations, level: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds by which forwards and backwards are late, by `--rrfp-jitter`'s own law."""
    config = jitter.LEVELS[level]
    delays = tuple(np.zeros_like(durations.forward) for _ in range(2))
    if not config.probability:
        return delays[0], delays[1]
    for stage in range(len(durations.forward)):
        law = jitter.Jitter(
            config, stage=stage, iteration=lambda: seed, stopwatch=jitter.HostStopwatch()
        )
        for kind, times, late in (
            (Kind.FORWARD, durations.forward, delays[0]),
            (Kind.BACKWARD, durations.backward, delays[1]),
        ):
            for microbatch, seconds in enumerate(times[stage]):
                task = Task(kind, microbatch, 0)
                law.learn(task, float(seconds))
                late[stage, microbatch] = law.delay_s(task)
    return delays[0], delays[1]


class Meter:
    """What one rank did in one batch: how long it slept, and what it held.

    Activations of a chunk are held from the end of its forward to the end of its backward, weight
    gradient included.
    """

    def __init__(self, chunks: int) -> None:
        self.slept_s = 0.0
        self.peak = 0.0
        """Most microbatches held at once, in activations of the rank's whole stage."""
        self._chunks = chunks
        self._held = 0

    def sleep(self, seconds: float) -> None:
        """Compute."""
        self.slept_s += seconds
        time.sleep(seconds)

    def hold(self) -> None:
        """A forward ended."""
        self._held += 1
        self.peak = max(self.peak, self._held / self._chunks)

    def release(self) -> None:
        """A backward ended, weight gradient included."""
        self._held -= 1


class _Sleep(torch.autograd.Function):
    """The identity, taking time forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, chunk: EmulatedChunk, microbatch: int) -> Any:
        ctx.chunk, ctx.microbatch = chunk, microbatch
        chunk.meter.sleep(float(chunk.times[0][microbatch]))
        chunk.meter.hold()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        chunk, microbatch = ctx.chunk, ctx.microbatch
        seconds = float(chunk.times[1][microbatch])
        collecting = weight_grad.current()
        if collecting is None and not chunk.leaves_weight_gradients:
            # All in one go, since every sleep lasts a little longer than it should.
            chunk.meter.sleep(seconds + float(chunk.times[2][microbatch]))
            chunk.meter.release()
            return gradient.clone(), None, None
        chunk.meter.sleep(seconds)
        weight_gradient = functools.partial(chunk.weight_gradient, microbatch)
        if collecting is not None:  # our executor runs it as a task of its own, or as several
            for layer in range(chunk.layers):
                collecting.put(functools.partial(weight_gradient, layer))
        else:  # PyTorch's schedules ask for it
            chunk.left = functools.partial(weight_gradient, None)
        return gradient.clone(), None, None


class EmulatedChunk(torch.nn.Module):
    """A model chunk whose compute is a sleep; good for Megatron's, PyTorch's and our schedules.

    Args:
        config: Megatron's, which it asks its models for.
        leaves_weight_gradients: Whether a backward leaves the weight gradient to whoever calls
            `take_weight_gradient`, which is what PyTorch's stages call a `dw_builder`.
        layers: Parts of a weight gradient that our executor may run on their own.
    """

    # What Megatron asks of its models.
    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False
    pre_process = post_process = True

    def __init__(
        self,
        config: Any,
        *,
        vp_stage: int | None = None,
        leaves_weight_gradients: bool = False,
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        self.vp_stage = vp_stage
        self.leaves_weight_gradients = leaves_weight_gradients
        self.layers = layers
        self.left: Callable[[], None] | None = None
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.input: torch.Tensor | None = None
        self.meter: Meter
        self.times: tuple[np.ndarray, np.ndarray, np.ndarray]
        self._microbatch = 0

    def begin(self, times: tuple[np.ndarray, np.ndarray, np.ndarray], meter: Meter) -> None:
        """Get ready for a batch: seconds of forwards, backwards and weight gradients."""
        self.times, self.meter, self._microbatch = times, meter, 0

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Called by Megatron with what the stage before sent."""
        self.input = tensors[0]

    def forward(self, data: torch.Tensor | None = None) -> torch.Tensor:
        """Sleep through the next microbatch's forward; its backward will sleep too."""
        if data is None:
            data = self.input
        if data is None:
            data = first_input()
        microbatch = self._microbatch
        self._microbatch += 1
        output: torch.Tensor = _Sleep.apply(data + self.weight, self, microbatch)
        return output

    def weight_gradient(self, microbatch: int, layer: int | None) -> None:
        """Sleep through a weight gradient, or through one layer's."""
        parts = 1 if layer is None else self.layers
        self.meter.sleep(float(self.times[2][microbatch]) / parts)
        if layer is None or layer == self.layers - 1:
            self.meter.release()

    def take_weight_gradient(self) -> Callable[[], None]:
        """What the last backward left."""
        assert self.left is not None
        left, self.left = self.left, None
        return left


def forward_step(_: Any, model: EmulatedChunk) -> tuple[torch.Tensor, Callable[..., Any]]:
    """What Megatron calls for every forward."""

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.mean()
        return value, {"loss": value.detach()}

    return model(), loss


def first_input() -> torch.Tensor:
    """A microbatch as it enters the model, of 16 KiB."""
    return torch.ones(SEQUENCE_LENGTH, 1, HIDDEN_SIZE)
