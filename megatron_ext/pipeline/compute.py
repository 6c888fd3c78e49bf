"""Computes the tasks of a stage: Megatron's own forward and backward step, on its model chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from megatron.core.pipeline_parallel import schedules

from megatron_ext.pipeline.batch import Chunk, Run
from megatron_ext.pipeline.random_state import RandomStates
from megatron_ext.pipeline.task import Direction, Kind, Task

FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT

TakeInput = Callable[[Task, Run], torch.Tensor | None]
Send = Callable[[Direction, Task, int, Run, torch.Tensor | None], None]


class Compute:
    """Of one stage.

    Args:
        stage: Its number.
        depth: Number of stages of the pipeline.
        random_states: Gives every forward its random states.
        take_input: Gives the tensor that came for a task.
        send: Takes a task's result, with its direction and the model chunk that it is for.
    """

    def __init__(
        self,
        stage: int,
        depth: int,
        *,
        random_states: RandomStates,
        take_input: TakeInput,
        send: Send,
    ) -> None:
        self._stage = stage
        self._depth = depth
        self._random_states = random_states
        self._input = take_input
        self._send = send

    def run(self, task: Task, run: Run, *, reduces: bool) -> None:
        """Run a task on its model chunk and hand its result to the neighbour.

        Args:
            task: Microbatches by their number in `run`.
            run: The batches under way.
            reduces: Whether reductions start here when gradients are complete; else whoever
                updates the weights sees to them.
        """
        chunk = run.chunks[task.chunk]
        last = task.microbatch == run.batch.end - 1 and reduces
        if task.kind is WEIGHT:
            complete = chunk.weight_gradients.run(
                last, run.weight_pieces, chunk.gradient_sync.paused
            )
            if last and complete:
                self._chunk_done(run, chunk)
            return
        splitting = (
            chunk.weight_gradients.collect() if run.weight_pieces else contextlib.nullcontext()
        )
        with splitting:
            if task.kind is FORWARD:
                self._forward(task, run, chunk)
                return
            # Megatron's own rule: stages but the first reduce in the bubble at the end.
            alone = run.place.chunks == 1
            if last and alone and (run.config.grad_sync_func is None or self._stage == 0):
                chunk.gradient_sync.enable()
            self._backward(task, run, chunk)
        if run.weight_pieces:
            chunk.weight_gradients.seal()
        elif last:
            self._chunk_done(run, chunk)

    def _chunk_done(self, run: Run, chunk: Chunk) -> None:
        """Start the reduction of a chunk whose gradients are complete, where there are several.

        Chunks are done in the same order on every data-parallel replica, last one first, because
        each needs the gradients of the one after it. Single parameters are not: a replica may run
        a weight task of one chunk before or after the last backward of another, so reductions
        may not be left to the hooks of parameters here.
        """
        if run.place.chunks > 1 and run.config.no_sync_func is not None:
            chunk.gradient_sync.enable()
            chunk.model.start_grad_sync()

    def _forward(self, task: Task, run: Run, chunk: Chunk) -> None:
        batch = run.batch_of(task)
        microbatch = task.microbatch - batch.first
        starts, ends = self._starts(task), self._ends(task, run)
        input_tensor = None if starts else self._input(task, run)
        several = run.place.chunks > 1
        if several and microbatch == 0:
            self._gather_parameters(run, task.chunk + 1)
        self._random_states.begin(batch.iteration, microbatch, task.chunk)
        output, num_tokens = schedules.forward_step(
            run.forward_step_func,
            chunk.data_iterator,
            chunk.model,
            batch.microbatches,
            input_tensor,
            batch.losses,
            run.config,
            cp_group_size=run.groups.cp.size(),
            collect_non_loss_data=run.collect_non_loss_data,
            checkpoint_activations_microbatch=self._checkpoints(task, run),
            is_first_microbatch=schedules.check_first_val_step(
                run.first_val_step, run.forward_only, microbatch == 0
            ),
            current_microbatch=microbatch,
            vp_stage=task.chunk if several else None,
            is_last_stage=ends,
        )
        if run.config.calculate_per_token_loss:
            batch.total_num_tokens += num_tokens
        result = output.detach()
        if not run.forward_only:
            chunk.inputs[task.microbatch] = input_tensor
            chunk.outputs[task.microbatch] = output
            # The result holds the output's memory; the graph needs only its history.
            schedules.deallocate_output_tensor(output, run.config.deallocate_pipeline_outputs)
        if not ends:
            wraps = self._stage == self._depth - 1
            self._send(Direction.FORWARD, task, task.chunk + wraps, run, result)

    def _gather_parameters(self, run: Run, chunk: int) -> None:
        """Start to gather a chunk's parameters while the one before it first runs."""
        functions = None if run.forward_only else run.config.param_sync_func
        if isinstance(functions, list) and chunk < len(functions):
            functions[chunk](run.chunks[chunk].model.parameters())

    def _backward(self, task: Task, run: Run, chunk: Chunk) -> None:
        gradient = None if self._ends(task, run) else self._input(task, run)
        input_gradient = schedules.backward_step(
            chunk.inputs.pop(task.microbatch),
            chunk.outputs.pop(task.microbatch),
            gradient,
            run.config,
        )
        if not self._starts(task):
            wraps = self._stage == 0
            self._send(Direction.BACKWARD, task, task.chunk - wraps, run, input_gradient)

    def _starts(self, task: Task) -> bool:
        """Whether the model begins with the task's chunk."""
        return self._stage == 0 and task.chunk == 0

    def _ends(self, task: Task, run: Run) -> bool:
        """Whether the model ends with the task's chunk."""
        return self._stage == self._depth - 1 and task.chunk == run.place.chunks - 1

    def _checkpoints(self, task: Task, run: Run) -> bool | None:
        """Whether all layers of this forward are checkpointed, where only some are to be.

        Megatron's own rule, whatever the order here: as many forwards as 1F1B may have under way
        on this stage form a window, and the last ones of each window are checkpointed.
        """
        partial = run.config.num_microbatches_with_partial_activation_checkpoints
        if partial is None:
            return None
        place, batch = run.place, run.batch_of(task)
        number, microbatches = task.microbatch - batch.first, batch.microbatches
        ahead = place.depth - place.stage - 1
        if place.chunks > 1:
            size = run.config.microbatch_group_size_per_vp_stage
            first = number // size * size
            in_group = min(size, microbatches - first)
            number += (place.chunks - 1) * first + task.chunk * in_group
            ahead = 2 * ahead + (place.chunks - 1) * size
        window = min(ahead, microbatches * place.chunks) + 1
        return bool(number % window >= partial)
