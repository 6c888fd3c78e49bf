"""What a stage gets from its neighbours and gives to them, on behalf of the batches under way."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.errors import PipelineError
from megatron_ext.pipeline.agreement import Agreement
from megatron_ext.pipeline.batch import Run
from megatron_ext.pipeline.batch_statistics import MessageTime
from megatron_ext.pipeline.task import Direction, Header, Kind, Task
from megatron_ext.pipeline.transport.base import Message, describe
from megatron_ext.pipeline.whereabouts import Whereabouts


class Messages:
    """Between the links of a stage and its runs.

    Args:
        links: To the neighbours.
        agreement: Takes arrivals, together with the ranks that share tasks.
        whereabouts: For what is said of a message that does not belong.
        is_delayed: Whether a run's batch is one of two that overlap.
    """

    def __init__(
        self,
        links: Any,
        agreement: Agreement,
        whereabouts: Whereabouts,
        is_delayed: Callable[[Run], bool],
    ) -> None:
        self._links = links
        self._agreement = agreement
        self._whereabouts = whereabouts
        self._is_delayed = is_delayed
        self._begun = 0
        self._future: dict[int, list[Message]] = defaultdict(list)
        """Messages of runs that this stage has not begun, by their numbers."""

    def begin(self, run: Run) -> None:
        """Let a run's messages in, those that came early first."""
        self._begun = run.number + 1
        for message in self._future.pop(run.number, ()):
            self.accept(run, message)

    @property
    def sent(self) -> int:
        """Activations that have left, as the links count them."""
        count: int = self._links.sent(Direction.FORWARD)
        return count

    def send(
        self, direction: Direction, task: Task, chunk: int, run: Run, tensor: torch.Tensor | None
    ) -> None:
        """Send a result to the neighbour's `chunk`."""
        dtype, shape = describe(tensor)
        header = Header(run.number, direction, task.microbatch, chunk, dtype, shape)
        run.statistics.sent.append(MessageTime(header, time.perf_counter()))
        self._links.send(Message(header, tensor))

    def take(self, run: Run, unfinished: Run | None) -> None:
        """Tell the arbiter what has arrived, and in a forward-only run what has left.

        Args:
            run: The one under way.
            unfinished: The one that waits for it to end, if it is an evaluation.
        """
        while message := self._links.take():
            number = message.header.batch
            if number == run.number:
                self.accept(run, message)
            elif unfinished is not None and number == unfinished.number:
                self.accept(unfinished, message)
                self.free_buffers(unfinished)
            elif number >= self._begun:
                self._future[number].append(message)
            else:
                raise PipelineError(
                    f"{self._whereabouts.where()}: an {message.header.direction.payload} of batch "
                    f"{number} arrived in batch {run.number}; the stages do not run the same "
                    "batches"
                )
        if run.forward_only:
            sent = self.sent
            self._agreement.released(run.arbiter, sent - run.sent)
            run.sent = sent

    def accept(self, run: Run, message: Message) -> None:
        """Tell the arbiter of a message, unless its batch may not begin yet."""
        header = message.header
        if header.microbatch >= run.arbiter.end and self._is_delayed(run):
            run.early.append(message)
            return
        task = Task(Kind(header.direction), header.microbatch, header.chunk)
        try:
            self._agreement.arrived(run.arbiter, task)
        except ValueError as error:
            raise PipelineError(f"{self._whereabouts.where()}: {error}") from error
        run.statistics.arrived.append(MessageTime(header, message.arrived or time.perf_counter()))
        run.arrived[task] = message.tensor

    def accept_early(self, run: Run) -> None:
        """The same of those that waited for their batch to begin."""
        early, run.early = run.early, []
        for message in early:
            self.accept(run, message)

    def free_buffers(self, run: Run) -> None:
        """Give back the receive buffers of a run that waits for an evaluation to end.

        What it holds keeps its own memory, and the evaluation needs the buffers.
        """
        held = [
            Task(Kind(m.header.direction), m.header.microbatch, m.header.chunk) for m in run.early
        ]
        for task in (*run.arrived, *held):
            if task not in run.freed:
                run.freed.add(task)
                self._links.consumed(Direction(task.kind))

    def input_of(self, task: Task, run: Run) -> torch.Tensor | None:
        """The tensor that came for a task; its buffer is free from now on."""
        tensor = run.arrived.pop(task)
        if task in run.freed:
            run.freed.remove(task)
        else:
            self._links.consumed(Direction(task.kind))
        if task.kind is Kind.FORWARD and tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_()
        return tensor
