"""The stage executor: Megatron's forward-backward function, driven by readiness.

`StageExecutor` is called like the schedules in `megatron.core.pipeline_parallel.schedules` and
leaves behind what they leave: the same losses, gradients and finalised buffers. What differs is
who decides the order: the arbiter, from what has arrived, instead of a list fixed beforehand.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_ext.arguments import RrfpConfig
from megatron_ext.errors import PipelineError, UsageError
from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.batch_statistics import BatchStatistics, Load, MessageTime
from megatron_ext.pipeline.hints import HINTS
from megatron_ext.pipeline.jitter import Jitter
from megatron_ext.pipeline.live_limit import parse_live_limit
from megatron_ext.pipeline.random_state import fork_random_state
from megatron_ext.pipeline.task import Direction, Header, Task
from megatron_ext.pipeline.trace import RankPlace, Trace
from megatron_ext.pipeline.transport.base import Message, Transport, TransportError, describe
from megatron_ext.pipeline.transport.gloo import GlooTransport, make_group

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@dataclass
class _Batch:
    """One call of the schedule: its arguments, and the tensors that tasks hand to each other."""

    number: int
    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    config: Any
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    groups: Any
    arbiter: Arbiter
    statistics: BatchStatistics
    total_num_tokens: torch.Tensor
    losses: list[Any] = field(default_factory=list)
    arrived: dict[Task, torch.Tensor | None] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    sent: int = 0
    """Outputs that the next stage had taken, over all batches, when last looked at."""


class StageExecutor:
    """Runs the batches of one pipeline stage; lives as long as the process.

    Args:
        config: The pipeline's settings.
        seed: Seed of the random states of this stage's forwards.
        iteration: Gives the number of the training iteration under way.
        transport: Links to the neighbours; made at the first batch if not given.
        jitter: Gives the delays to inject on this stage; None for none.
    """

    def __init__(
        self,
        config: RrfpConfig,
        *,
        seed: int,
        iteration: Callable[[], int],
        transport: Transport | None = None,
        jitter: Callable[[], Jitter | None] = lambda: None,
    ) -> None:
        self.config = config
        self.statistics: BatchStatistics | None = None
        self._seed = seed
        self._iteration = iteration
        self._transport = transport
        self._jitter = jitter
        self._trace: Trace | None = None
        self._batches = 0

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run all forwards, and unless `forward_only` all backwards, of one batch.

        The arguments are those of Megatron's own schedules. Shapes travel with the messages, so
        `seq_length`, `micro_batch_size`, `decoder_seq_length` and `adjust_tensor_shapes_fn` are
        not needed; nor is `p2p_communicator`.

        Returns:
            On the last stage what the loss function reports, per microbatch; elsewhere [].

        Raises:
            PipelineError: A peer is lost, or nothing moved for the configured time.
        """
        groups = pg_collection or _default_groups()
        self._connect(groups, torch.device(torch.cuda.current_device()) if _on_gpu(model) else None)
        model = _only_chunk(model, "model")
        config = get_model_config(model)
        is_first, is_last = self._stage == 0, self._stage == self._depth - 1
        statistics = BatchStatistics(
            forward_only, number=self._batches, iteration=self._iteration() + 1
        )
        batch = _Batch(
            number=self._batches,
            forward_step_func=forward_step_func,
            data_iterator=_only_chunk(data_iterator, "data iterator"),
            model=model,
            config=config,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            groups=groups,
            arbiter=Arbiter(
                num_microbatches=num_microbatches,
                live_limit=self._live_limit,
                hint=HINTS[self.config.hint],
                is_first_stage=is_first,
                is_last_stage=is_last,
                forward_only=forward_only,
            ),
            statistics=statistics,
            total_num_tokens=torch.zeros([], dtype=torch.int, device=self._device),
            sent=0 if is_last else self._links.sent(FORWARD),
        )
        self._batches += 1
        if not is_first:
            self._links.expect(FORWARD, num_microbatches)
        if not is_last and not forward_only:
            self._links.expect(BACKWARD, num_microbatches)

        with self._traced(statistics):
            if config.timers is not None:
                config.timers("forward-backward", log_level=1).start(
                    barrier=config.barrier_with_L1_time
                )
            gradient_sync = _GradientSync(config)
            with gradient_sync:
                self._run_tasks(batch, gradient_sync)
                if not forward_only and gradient_sync.disabled:
                    gradient_sync.enable()
                    if config.grad_sync_func is not None:
                        config.grad_sync_func(model.parameters())
            if config.finalize_model_grads_func is not None and not forward_only:
                with statistics.timed(statistics.reductions):
                    self._finalize(batch, force_all_reduce)
            if config.timers is not None:
                config.timers("forward-backward").stop()
        self.statistics = statistics
        return batch.losses

    # Setting up.

    @property
    def pipeline(self) -> list[int]:
        """The ranks of this pipeline, stage by stage; known from the first batch on."""
        return self._ranks

    @property
    def connected(self) -> bool:
        """Whether the stage knows its place and has its links: from its first batch on."""
        return hasattr(self, "_links")

    def _connect(self, groups: Any, device: torch.device | None) -> None:
        """Learn this stage's place and open its links, once."""
        if self.connected:
            return
        ranks = dist.get_process_group_ranks(groups.pp)
        self._ranks = ranks
        self._depth = len(ranks)
        self._stage = groups.pp.rank()
        self._live_limit = parse_live_limit(self.config.live_limit, self._depth)
        self._device = device or torch.device("cpu")
        if self.config.trace is not None:
            place = RankPlace(ranks[self._stage], dist.get_world_size(), self._stage, ranks)
            self._trace = Trace(self.config.trace, place, timeout_s=self.config.timeout_s)
        if self._transport is not None:
            self._links = self._transport
            return
        before, after = self._stage - 1, self._stage + 1
        sources = {FORWARD: before} if before >= 0 else {}
        destinations = {BACKWARD: before} if before >= 0 else {}
        if after < self._depth:
            sources[BACKWARD] = after
            destinations[FORWARD] = after
        self._links = GlooTransport(
            # The executor watches the time and knows what it waits for; gloo only backs it up.
            make_group(ranks, 2 * self.config.timeout_s + 10),
            sources=sources,
            destinations=destinations,
            capacity=self._live_limit,
            device=self._device,
        )

    # One batch.

    def _traced(self, statistics: BatchStatistics) -> contextlib.AbstractContextManager[None]:
        return self._trace.batch(statistics) if self._trace else contextlib.nullcontext()

    def _jittered(self, task: Task) -> contextlib.AbstractContextManager[None]:
        """Forward and backward steps delay themselves by a hook; the time of others counts too."""
        jitter = self._jitter()
        delays_itself = task[0] in (FORWARD, BACKWARD)
        return jitter.around(task) if jitter and not delays_itself else contextlib.nullcontext()

    def _run_tasks(self, batch: _Batch, gradient_sync: _GradientSync) -> None:
        arbiter, statistics = batch.arbiter, batch.statistics
        self._links.report_sent(batch.forward_only)
        statistics.started = time.perf_counter()
        try:
            while not arbiter.finished:
                self._take_arrivals(batch)
                started = time.perf_counter()
                task = arbiter.choose()
                decided = time.perf_counter()
                statistics.loads.append(Load(decided, arbiter.ready_count, arbiter.live))
                if task is None:
                    with statistics.timed(statistics.waits):
                        self._wait(batch)
                    continue
                statistics.dispatch_s.append(decided - started)
                with statistics.running(task), self._jittered(task):
                    self.run_task(task, batch, gradient_sync)
                arbiter.completed(task)
            if not self._links.flush(self.config.timeout_s):
                raise PipelineError(f"{self.where()}: {self._no_progress()}: a peer takes no more")
        except TransportError as error:
            raise self._lost_peer(batch, error) from error
        finally:
            statistics.ended = time.perf_counter()
            statistics.peak_live = arbiter.peak_live

    def run_task(self, task: Task, batch: _Batch, gradient_sync: _GradientSync) -> None:
        """Run one task on this stage's model chunk and hand its result to the neighbour."""
        if task.direction is FORWARD:
            self._forward(task, batch)
        else:
            if task.microbatch == batch.num_microbatches - 1 and (
                batch.config.grad_sync_func is None or self._stage == 0
            ):
                gradient_sync.enable()
            self._backward(task, batch)

    def _forward(self, task: Task, batch: _Batch) -> None:
        microbatch = task.microbatch
        input_tensor = self._input(task, batch) if self._stage > 0 else None
        first = microbatch == 0
        with fork_random_state(self._seed, self._iteration(), microbatch, task.chunk, self._device):
            output, num_tokens = schedules.forward_step(
                batch.forward_step_func,
                batch.data_iterator,
                batch.model,
                batch.num_microbatches,
                input_tensor,
                batch.losses,
                batch.config,
                cp_group_size=batch.groups.cp.size(),
                collect_non_loss_data=batch.collect_non_loss_data,
                checkpoint_activations_microbatch=self._checkpoints(batch, microbatch),
                is_first_microbatch=schedules.check_first_val_step(
                    batch.first_val_step, batch.forward_only, first
                ),
                current_microbatch=microbatch,
                is_last_stage=self._stage == self._depth - 1,
            )
        batch.total_num_tokens += num_tokens
        if self._stage < self._depth - 1:
            self._send(FORWARD, task, batch, output)
        if not batch.forward_only:
            batch.inputs[microbatch] = input_tensor
            batch.outputs[microbatch] = output
            # The message holds the output's memory by now; the graph needs only its history.
            schedules.deallocate_output_tensor(output, batch.config.deallocate_pipeline_outputs)

    def _backward(self, task: Task, batch: _Batch) -> None:
        gradient = self._input(task, batch) if self._stage < self._depth - 1 else None
        input_gradient = schedules.backward_step(
            batch.inputs.pop(task.microbatch),
            batch.outputs.pop(task.microbatch),
            gradient,
            batch.config,
        )
        if self._stage > 0:
            self._send(BACKWARD, task, batch, input_gradient)

    def _checkpoints(self, batch: _Batch, microbatch: int) -> bool | None:
        """Whether all layers of this microbatch are checkpointed, where only some are to be."""
        partial = batch.config.num_microbatches_with_partial_activation_checkpoints
        if partial is None:
            return None
        window = min(self._depth - self._stage - 1, batch.num_microbatches) + 1
        return bool(microbatch % window >= partial)

    def _finalize(self, batch: _Batch, force_all_reduce: bool | None) -> None:
        """Reduce gradients over replicas and tied embeddings, as Megatron's schedules do."""
        tokens = batch.total_num_tokens if batch.config.calculate_per_token_loss else None
        try:
            batch.config.finalize_model_grads_func(
                [batch.model],
                tokens,
                pg_collection=batch.groups,
                force_all_reduce=force_all_reduce,
            )
        except RuntimeError as error:
            raise PipelineError(self.lost_in_collective(error)) from error

    # Messages.

    def _send(
        self, direction: Direction, task: Task, batch: _Batch, tensor: torch.Tensor | None
    ) -> None:
        tensor = tensor.detach() if tensor is not None else None
        dtype, shape = describe(tensor)
        header = Header(batch.number, direction, task.microbatch, task.chunk, dtype, shape)
        batch.statistics.sent.append(MessageTime(header, time.perf_counter()))
        self._links.send(Message(header, tensor))

    def _take_arrivals(self, batch: _Batch) -> None:
        """Tell the arbiter what has arrived, and in a forward-only batch what has left."""
        while message := self._links.take():
            header = message.header
            if header.batch != batch.number:
                raise PipelineError(
                    f"{self.where()}: an {header.direction.payload} of batch {header.batch} "
                    f"arrived in batch {batch.number}; the stages do not run the same batches"
                )
            try:
                batch.arbiter.arrived(header.direction, header.microbatch)
            except ValueError as error:
                raise PipelineError(f"{self.where()}: {error}") from error
            batch.statistics.arrived.append(
                MessageTime(header, message.arrived or time.perf_counter())
            )
            batch.arrived[Task(header.direction, header.microbatch, header.chunk)] = message.tensor
        if batch.forward_only and self._stage < self._depth - 1:
            sent = self._links.sent(FORWARD)
            batch.arbiter.released(sent - batch.sent)
            batch.sent = sent

    def _input(self, task: Task, batch: _Batch) -> torch.Tensor | None:
        tensor = batch.arrived.pop(task)
        self._links.consumed(task.direction)
        if task.direction is FORWARD and tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_()
        return tensor

    # Waiting, and what to say when it does not end.

    def _wait(self, batch: _Batch) -> None:
        with self._telling_of_termination(batch):
            happened = self._links.wait(self.config.timeout_s)
        if not happened:
            raise PipelineError(
                f"{self.where()}: {self._no_progress()} while waiting for "
                f"{self._awaited(batch)}; that stage, or one behind it, hangs or is slower than "
                "this limit allows"
            )

    @contextlib.contextmanager
    def _telling_of_termination(self, batch: _Batch) -> Iterator[None]:
        """On SIGTERM say what was awaited: launchers end the peers of a dead rank with it.

        Only while waiting here, and only if nobody else handles the signal: inside a collective
        a Python handler would keep the default action from ending the process.
        """

        def tell(number: int, _: object) -> None:
            line = f"{self.where()}: ended by SIGTERM while waiting for {self._awaited(batch)}"
            os.write(sys.stderr.fileno(), f"megatron_ext: error: {line}\n".encode())
            if self._trace:
                self._trace.write(batch.statistics, line)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        free = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if free:
            signal.signal(signal.SIGTERM, tell)
        try:
            yield
        finally:
            if free:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def where(self) -> str:
        """This stage, rank and iteration, for messages."""
        rank = self._ranks[self._stage]
        return (
            f"stage {self._stage} of {self._depth} (rank {rank}), iteration {self._iteration() + 1}"
        )

    def _no_progress(self) -> str:
        return f"no progress for {self.config.timeout_s:g} s (--rrfp-timeout)"

    def _peer(self, stage: int) -> str:
        return f"stage {stage} (rank {self._ranks[stage]})"

    def _awaited(self, batch: _Batch) -> str:
        waits = [
            f"the {task.direction.payload} of microbatch {task.microbatch} from "
            + self._peer(self._stage + (1 if task.direction is BACKWARD else -1))
            for task in batch.arbiter.awaited()
        ]
        if waits:
            return " or ".join(waits)
        return f"{self._peer(self._stage + 1)} to take the outputs sent to it"

    def lost_in_collective(self, error: BaseException) -> str:
        """What to say of an error outside the tasks: there a stage waits for ranks, not tasks."""
        return (
            f"{self.where()}: all tasks of the batch are done here; failed in what follows them, "
            f"waiting for other ranks to reduce gradients, norms or losses with "
            f"({type(error).__name__}: {_first_line(error)}); look for the first error of all ranks"
        )

    def _lost_peer(self, batch: _Batch, error: TransportError) -> PipelineError:
        act = "sending to" if error.sending else "receiving from"
        return PipelineError(
            f"{self.where()}: lost {self._peer(error.peer)} while waiting for "
            f"{self._awaited(batch)} ({act} it: {error}); look for the first error of that rank"
        )


class _GradientSync(contextlib.AbstractContextManager["_GradientSync"]):
    """Keeps data-parallel gradient reduction off until the last backward turns it on."""

    def __init__(self, config: Any) -> None:
        self._no_sync = config.no_sync_func or contextlib.nullcontext
        self._stack = contextlib.ExitStack()
        self.disabled = False

    def __enter__(self) -> _GradientSync:
        self._stack.enter_context(self._no_sync())
        self.disabled = True
        return self

    def enable(self) -> None:
        self._stack.close()
        self.disabled = False

    def __exit__(self, *_: object) -> None:
        self.enable()


def _default_groups() -> Any:
    names = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp", "tp_dp_cp", "dp"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


def _only_chunk(value: Any, what: str) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise UsageError(
            f"--pipeline-schedule rrfp got {len(value)} {what}s: it does not support virtual "
            "stages yet; leave out --num-layers-per-virtual-pipeline-stage"
        )
    return value[0]


def _on_gpu(model: Any) -> bool:
    model = model[0] if isinstance(model, list) else model
    return any(parameter.is_cuda for parameter in model.parameters())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
