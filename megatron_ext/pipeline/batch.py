"""What the stage executor keeps of the batches that it runs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.batch_statistics import BatchStatistics
from megatron_ext.pipeline.hints import Place
from megatron_ext.pipeline.task import Task
from megatron_ext.pipeline.transport.base import Message
from megatron_ext.pipeline.weight_grad import WeightGradients


@dataclass
class Chunk:
    """One model chunk of the stage, and what its tasks hand to each other, by microbatch."""

    model: Any
    data_iterator: Any
    gradient_sync: GradientSync
    weight_gradients: WeightGradients
    inputs: dict[int, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Batch:
    """The microbatches between two updates, or those of one evaluation step."""

    iteration: int
    """Training iteration, from 0."""
    first: int
    """Number of its first microbatch in its run."""
    microbatches: int
    total_num_tokens: torch.Tensor
    losses: list[Any] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Number, in the run, of the first microbatch after it."""
        return self.first + self.microbatches


@dataclass
class Run:
    """Batches that go through the pipeline without a drain between them: one, or many with 2BW.

    Microbatches are numbered on from batch to batch.
    """

    number: int
    """Running number, training and evaluation counted together."""
    forward_step_func: Callable[..., Any]
    chunks: list[Chunk]
    config: Any
    groups: Any
    place: Place
    forward_only: bool
    weight_pieces: int
    """Tasks that make up the weight gradient of a microbatch; 0 where it is not split off."""
    collect_non_loss_data: bool
    first_val_step: bool | None
    arbiter: Arbiter
    statistics: BatchStatistics
    """Of the batch that is to be finished."""
    batches: deque[Batch] = field(default_factory=deque)
    arrived: dict[Task, torch.Tensor | None] = field(default_factory=dict)
    early: list[Message] = field(default_factory=list)
    """Messages of microbatches that may not run yet."""
    freed: set[Task] = field(default_factory=set)
    """Inputs whose receive buffers have been given back before they were used."""
    sent: int = 0
    """Outputs that the next stage had taken, over all runs, when last looked at."""

    @property
    def batch(self) -> Batch:
        """The batch that is to be finished."""
        return self.batches[0]

    def batch_of(self, task: Task) -> Batch:
        """The batch that a task belongs to."""
        for batch in self.batches:
            if task.microbatch < batch.end:
                return batch
        raise KeyError(task)

    def name(self, task: Task) -> Task:
        """The task with its microbatch's number in its own batch, for messages."""
        return task._replace(microbatch=task.microbatch - self.batch_of(task).first)


class GradientSync(contextlib.AbstractContextManager["GradientSync"]):
    """Keeps the data-parallel reduction of a chunk off until its gradients are complete."""

    def __init__(self, no_sync: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._no_sync = no_sync
        self._stack = contextlib.ExitStack()
        self.enabled = True

    @staticmethod
    def of(config: Any, chunk: int) -> GradientSync:
        """That of one chunk, as Megatron's configuration has it."""
        no_sync = config.no_sync_func
        if isinstance(no_sync, list):
            no_sync = no_sync[chunk]
        return GradientSync(no_sync or contextlib.nullcontext)

    def __enter__(self) -> GradientSync:
        self._stack.enter_context(self._no_sync())
        self.enabled = False
        return self

    def enable(self) -> None:
        """Let reductions start."""
        self._stack.close()
        self.enabled = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep reductions from starting for a while, enabled or not."""
        with self._no_sync() if self.enabled else contextlib.nullcontext():
            yield

    def __exit__(self, *_: object) -> None:
        self.enable()
