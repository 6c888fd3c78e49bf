"""Training one step late: what the stage executor and Megatron's loop ask of two weight versions.

Batch k computes on the weights that the update of batch k-2 made, so it can begin while batch k-1
is still under way, and while that one's gradients are reduced and applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_ext.arguments import Pipedream2bwConfig
from megatron_ext.pipedream_2bw.background import BackgroundUpdate
from megatron_ext.pipedream_2bw.error_feedback import ErrorFeedback
from megatron_ext.pipedream_2bw.gradients import GradientBuffers, HiddenGradients
from megatron_ext.pipedream_2bw.loss_scale import LossScales
from megatron_ext.pipedream_2bw.weights import WeightVersions


class DelayedUpdates:
    """The weights, gradients and updates of one stage, from the first batch to the last.

    Batches go by the number of their iteration, from 0.

    Args:
        config: When training is delayed, and how.
        models: The stage's model chunks, wrapped for data parallelism.
        optimizer: Megatron's optimizer of these chunks; its `step` is replaced.
        end: The first batch that is not to run.
        batch_size: Gives the number of microbatches of a batch that is not under way yet.
        two_gradient_buffers: Whether the next batch's backwards run before the update is done.
    """

    def __init__(
        self,
        config: Pipedream2bwConfig,
        models: list[Any],
        optimizer: Any,
        *,
        end: int,
        batch_size: Callable[[int], int],
        two_gradient_buffers: bool,
    ) -> None:
        self.first = config.start_iteration
        """The batch that training is delayed from; it is itself not delayed yet."""
        self._end = min(end, config.end_iteration) if config.end_iteration is not None else end
        self._batch_size = batch_size
        self._config = models[0].config
        self._optimizer = optimizer
        self._optimizer_step = optimizer.step
        optimizer.step = self.step
        self.weights = WeightVersions(models, optimizer)
        self._gradients = GradientBuffers(models, two=two_gradient_buffers)
        self._hidden = HiddenGradients(models)
        self._parameters = tuple(p for m in models for p in m.parameters() if p.requires_grad)
        self._scales = LossScales(optimizer)
        self._scale_of: dict[int, torch.Tensor] = {}
        self._scale_of_first: torch.Tensor | None = None
        self._went_on = False
        self._scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.error_feedback: ErrorFeedback | None = None
        if config.error_feedback:
            self.error_feedback = ErrorFeedback(optimizer, config.error_feedback)
        self._update: BackgroundUpdate | None = None
        self._stepping = False
        self._result: tuple[Any, ...] | None = None
        self._computed_on: dict[int, int] = {}
        self.version_lag = 0
        """By how many updates the last update's gradient was late."""
        self.agreed = False
        """Whether the last step's outcome is agreed on by all stages, or is not to be."""

    # Where a run begins.

    def begin_at(self, batch: int) -> None:
        """This is the first batch of the process, and its weights are the newest."""
        self.weights.newest = batch
        if not self._went_on:  # else with the version before it, too
            self.first = max(self.first, batch)

    def go_on_from(self, first: int, scale: torch.Tensor | None) -> None:
        """Two versions were loaded, of a run that had been delayed from batch `first` on.

        Args:
            first: That batch.
            scale: Loss scale of the first batch here, where there is one.
        """
        self._went_on = True
        self.first = first
        self._scale_of_first = scale

    def scale_of_next(self) -> torch.Tensor | None:
        """The loss scale of the batch that is under way, or comes next, if there is a scale."""
        if not self._scales:
            return None
        return self._scale_of.get(self.weights.newest, self._scales.begin())

    # Which batches.

    def delays(self, batch: int) -> bool:
        """Whether this batch's update is made here, beside the tasks of the next batch."""
        return self.first <= batch < self._end

    def overlaps_next(self, batch: int, microbatches: int) -> bool:
        """Whether the next batch may begin before this one, of that many microbatches, is done."""
        following = batch + 1
        return (
            self.delays(batch)
            and self.delays(following)
            and self._batch_size(following) == microbatches
        )

    def lag(self, batch: int) -> int:
        """How many updates older than the newest weights those are that a batch computes with."""
        return 1 if self.delays(batch) and batch > self.first else 0

    @property
    def holds_backwards(self) -> bool:
        """Whether the next batch's backwards wait for the update: there is one buffer."""
        return not self._gradients.two

    # Around tasks.

    def begin_batch(self, batch: int) -> None:
        """A batch begins: its loss scale is settled."""
        scale, self._scale_of_first = self._scale_of_first, None
        self._scale_of[batch] = self._scales.begin() if scale is None else scale
        if self._scale_loss is None:
            self._scale_loss = self._config.grad_scale_func

    def select(self, batch: int) -> None:
        """Point to the weights and gradients of a batch whose task is next."""
        version = batch - self.lag(batch)
        self.weights.select(version)
        self._computed_on[batch] = version
        self._gradients.select(batch)
        if self._scale_loss is not None:
            scale = self._scale_of[batch]
            self._config.grad_scale_func = lambda loss: scale * loss

    def select_newest(self) -> None:
        """Point to the newest weights, as all that is not a task of a batch expects them."""
        self.weights.select(self.weights.newest)

    # The update.

    def begin_update(
        self, batch: int, reduce: Callable[[], None], wake: Callable[[], None], device: Any
    ) -> None:
        """Begin the update of a batch whose tasks are done.

        Args:
            batch: Its iteration.
            reduce: Megatron's reduction of its gradients.
            wake: Ends a wait of the compute thread; may be called from another thread.
            device: Where the model is.
        """
        versions = _unsafe_preserve_version_counter(self._parameters)
        scale = self._scale_of.pop(batch)

        def work() -> tuple[Any, ...]:
            reduce()
            newest = self.weights.newest
            self.version_lag = newest - self._computed_on.pop(batch, newest)
            self.weights.prepare_next()
            self._stepping = True
            self._scales.update_with(scale)
            if self.error_feedback is not None:
                self.error_feedback.records = True
                self.error_feedback.corrects = batch > self.first
            result: tuple[Any, ...] = self._optimizer_step()
            self._scales.update_with(None)
            self._stepping = False
            self.weights.commit()
            return result

        def enter() -> None:
            self._gradients.select(batch)
            if self._stepping:
                self.weights.select_older()
            self._hidden.show()

        def leave() -> None:
            self._hidden.hide()
            # What is in flight computed with the other copy, which no optimizer writes to.
            versions.__exit__()

        self._update = BackgroundUpdate(work, enter=enter, leave=leave, wake=wake, device=device)

    def drive(self) -> bool:
        """Let the update go on if it can; True once when it is done.

        Raises:
            Exception: What the update raised.
        """
        update = self._update
        if update is None or not update.wants:
            return False
        update.go_on()
        if not update.done:
            return False
        self._update, self._result = None, update.result
        return True

    @property
    def grad_norm(self) -> float | None:
        """Of the update that has just been done, before clipping; None where there is none."""
        norm = None if self._result is None else self._result[1]
        return None if norm is None else float(norm)

    @property
    def ready(self) -> bool:
        """Whether an update is under way and can go on."""
        return self._update is not None and self._update.wants

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._update is not None

    def end_batch(self, batch: int) -> None:
        """Leave all as Megatron's loop expects it after a batch: its gradients, newest weights."""
        self._gradients.select(batch)
        self.select_newest()
        if self._scale_loss is not None:
            self._config.grad_scale_func = self._scale_loss

    def step(self) -> tuple[Any, ...]:
        """In place of the optimizer's step: what the update of this batch gave.

        A batch that is not delayed is updated here and now.
        """
        if self._result is not None:
            result, self._result = self._result, None
            self.agreed = True
            return result
        self.agreed = False
        if self.error_feedback is not None:
            self.error_feedback.records = False
        outcome: tuple[Any, ...] = self._optimizer_step()
        self.weights.step_in_place()
        return outcome
