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
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_ext.arguments import RrfpConfig
from megatron_ext.errors import PipelineError, UsageError
from megatron_ext.pipeline.agreement import Agreement, AgreementError, Alone, agree
from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.batch_statistics import BatchStatistics, Load, MessageTime
from megatron_ext.pipeline.hints import BackwardForward, Place, find_hint
from megatron_ext.pipeline.jitter import Jitter
from megatron_ext.pipeline.live_limit import parse_live_limit
from megatron_ext.pipeline.random_state import RandomStates
from megatron_ext.pipeline.task import Direction, Header, Kind, Task
from megatron_ext.pipeline.trace import RankPlace, Trace
from megatron_ext.pipeline.transport.base import Message, TransportError, describe
from megatron_ext.pipeline.transport.choose import open_links
from megatron_ext.pipeline.weight_grad import WeightGradients

_NOTHING = contextlib.nullcontext()
FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


@dataclass
class _Chunk:
    """One model chunk of the stage, and what its tasks hand to each other, by microbatch."""

    model: Any
    data_iterator: Any
    gradient_sync: _GradientSync
    weight_gradients: WeightGradients
    inputs: dict[int, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Batch:
    """One call of the schedule."""

    number: int
    forward_step_func: Callable[..., Any]
    chunks: list[_Chunk]
    config: Any
    groups: Any
    place: Place
    forward_only: bool
    splits_weight: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    arbiter: Arbiter
    statistics: BatchStatistics
    total_num_tokens: torch.Tensor
    losses: list[Any] = field(default_factory=list)
    arrived: dict[Task, torch.Tensor | None] = field(default_factory=dict)
    sent: int = 0
    """Outputs that the next stage had taken, over all batches, when last looked at."""

    @property
    def num_microbatches(self) -> int:
        return self.place.microbatches


class StageExecutor:
    """Runs the batches of one pipeline stage; lives as long as the process.

    Args:
        config: The pipeline's settings.
        seed: Seed of the random states of this stage's forwards.
        iteration: Gives the number of the training iteration under way.
        jitter: Gives the delays to inject on this stage; None for none.
    """

    def __init__(
        self,
        config: RrfpConfig,
        *,
        seed: int,
        iteration: Callable[[], int],
        jitter: Callable[[], Jitter | None] = lambda: None,
    ) -> None:
        self.config = config
        self.statistics: BatchStatistics | None = None
        self._hint = find_hint(config.hint)
        self._seed = seed
        self._iteration = iteration
        self._jitter = jitter
        self._trace: Trace | None = None
        self._batches = 0
        # What is under way, for errors.
        self._evaluating = False
        self._running: Task | None = None

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
        models = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        groups = pg_collection or _default_groups()
        self._connect(groups, models)
        config = get_model_config(models[0])
        syncs = [_GradientSync(config, number) for number in range(len(models))]
        place = Place(
            self._stage, self._depth, num_microbatches, self._live_limit, chunks=len(models)
        )
        try:
            # Without backwards nothing is left to rank, and a fixed order would wait for them.
            hint = BackwardForward(place) if forward_only else self._hint(place)
        except ValueError as error:
            raise UsageError(f"--rrfp-hint {self.config.hint}: {error}") from None
        batch = _Batch(
            number=self._batches,
            forward_step_func=forward_step_func,
            chunks=[
                _Chunk(chunk, iterator, sync, WeightGradients(chunk))
                for chunk, iterator, sync in zip(models, iterators, syncs, strict=True)
            ],
            config=config,
            groups=groups,
            place=place,
            forward_only=forward_only,
            splits_weight=hint.splits_weight and not forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            arbiter=Arbiter(place, hint, forward_only=forward_only),
            statistics=BatchStatistics(
                forward_only, number=self._batches, iteration=self._iteration() + 1
            ),
            total_num_tokens=torch.zeros([], dtype=torch.int, device=self._device),
            sent=self._sent(),
        )
        self._batches += 1
        self._evaluating = forward_only
        self._expect(batch)
        statistics = batch.statistics
        with self._traced(statistics):
            if config.timers is not None:
                config.timers("forward-backward", log_level=1).start(
                    barrier=config.barrier_with_L1_time
                )
            with contextlib.ExitStack() as stack:
                for sync in syncs:
                    stack.enter_context(sync)
                stack.enter_context(self._random_states.kept())
                self._run_tasks(batch)
                if not forward_only:
                    self._start_remaining_reductions(batch)
            if config.finalize_model_grads_func is not None and not forward_only:
                with statistics.timed(statistics.reductions):
                    self._finalize(batch, force_all_reduce)
            if config.timers is not None:
                config.timers("forward-backward").stop()
        self.statistics = statistics
        self._evaluating = False
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

    def _connect(self, groups: Any, models: list[Any]) -> None:
        """Learn this stage's place and open its links, once."""
        if self.connected:
            return
        ranks = dist.get_process_group_ranks(groups.pp)
        self._ranks = ranks
        self._depth = len(ranks)
        self._stage = groups.pp.rank()
        if self.config.trace is not None:
            place = RankPlace(ranks[self._stage], dist.get_world_size(), self._stage, ranks)
            self._trace = Trace(self.config.trace, place, timeout_s=self.config.timeout_s)
        self._live_limit = parse_live_limit(
            self.config.live_limit or self._hint.live_limit, self._depth
        )
        on_gpu = any(parameter.is_cuda for parameter in models[0].parameters())
        self._device = torch.device(torch.cuda.current_device() if on_gpu else "cpu")
        self._random_states = RandomStates(self._seed, self._device)
        self._agreement: Agreement = agree(groups, len(models), self.config.timeout_s)
        self._shares_tasks = not isinstance(self._agreement, Alone)
        # With chunks the stages form a ring: the last one's output goes on to the first one.
        before, after = self._stage - 1, self._stage + 1
        ring = len(models) > 1
        sources: dict[Direction, int] = {}
        destinations: dict[Direction, int] = {}
        if before >= 0 or ring:
            sources[Direction.FORWARD] = destinations[Direction.BACKWARD] = before % self._depth
        if after < self._depth or ring:
            sources[Direction.BACKWARD] = destinations[Direction.FORWARD] = after % self._depth
        self._links = open_links(
            self.config.transport,
            ranks,
            sources=sources,
            destinations=destinations,
            capacity=self._live_limit * len(models),
            device=self._device,
            timeout_s=self.config.timeout_s,
        )

    def _expect(self, batch: _Batch) -> None:
        """Let the messages of this batch in."""
        place = batch.place
        for direction, edge in ((Direction.FORWARD, 0), (Direction.BACKWARD, place.depth - 1)):
            # At the model's ends one chunk gets its input from the data or the loss.
            chunks = place.chunks - (place.stage == edge)
            if chunks and not (direction is Direction.BACKWARD and batch.forward_only):
                self._links.expect(direction, chunks * place.microbatches)

    # One batch.

    def _traced(self, statistics: BatchStatistics) -> contextlib.AbstractContextManager[None]:
        return self._trace.batch(statistics) if self._trace else contextlib.nullcontext()

    def _jittered(self, task: Task) -> contextlib.AbstractContextManager[None]:
        """Forward and backward steps delay themselves by a hook; the time of others counts too."""
        jitter = self._jitter()
        delays_itself = task.kind in (FORWARD, BACKWARD)
        return jitter.around(task) if jitter and not delays_itself else contextlib.nullcontext()

    def _run_tasks(self, batch: _Batch) -> None:
        arbiter, statistics = batch.arbiter, batch.statistics
        self._links.report_sent(batch.forward_only)
        self._agreement.start(arbiter)
        statistics.started = time.perf_counter()
        try:
            while not arbiter.finished:
                self._take_arrivals(batch)
                started = time.perf_counter()
                task = self._agreement.choose(arbiter)
                decided = time.perf_counter()
                if self._trace:
                    statistics.loads.append(Load(decided, arbiter.ready.count, arbiter.live))
                if task is None:
                    with statistics.waiting():
                        self._wait(batch)
                    continue
                statistics.dispatch_s.append(decided - started)
                if self._shares_tasks:
                    statistics.agreement_s.append(decided - started)
                self._running = task
                with statistics.running(task), self._jittered(task):
                    self.run_task(task, batch)
                self._running = None
                arbiter.completed(task)
            self._flush(batch)
            if batch.forward_only:  # all that left is counted alike on ranks that agree
                self._take_arrivals(batch)
        except TransportError as error:
            raise self._lost_peer(batch, error) from error
        except AgreementError as error:
            raise PipelineError(
                f"{self.where()}: lost a rank that runs the same tasks while waiting for "
                f"{self._awaited(batch)} ({_first_line(error)}); look for the first error of "
                f"{self._companions()}"
            ) from error
        finally:
            statistics.ended = time.perf_counter()
            statistics.peak_live = arbiter.peak_live

    def run_task(self, task: Task, batch: _Batch) -> None:
        """Run one task on its model chunk and hand its result to the neighbour."""
        chunk = batch.chunks[task.chunk]
        last = task.microbatch == batch.num_microbatches - 1
        if task.kind is WEIGHT:
            chunk.weight_gradients.run(last)
            if last:
                self._chunk_done(batch, chunk)
            return
        splitting = chunk.weight_gradients.collect() if batch.splits_weight else _NOTHING
        with splitting:
            if task.kind is FORWARD:
                self._forward(task, batch, chunk)
                return
            # Megatron's own rule: stages but the first reduce in the bubble at the end.
            alone = batch.place.chunks == 1
            if last and alone and (batch.config.grad_sync_func is None or self._stage == 0):
                chunk.gradient_sync.enable()
            self._backward(task, batch, chunk)
        if batch.splits_weight:
            chunk.weight_gradients.seal()
        elif last:
            self._chunk_done(batch, chunk)

    def _chunk_done(self, batch: _Batch, chunk: _Chunk) -> None:
        """Start the reduction of a chunk whose gradients are complete, where there are several.

        Chunks are done in the same order on every data-parallel replica, last one first, because
        each needs the gradients of the one after it. Single parameters are not: a replica may run
        a weight task of one chunk before or after the last backward of another, so reductions
        may not be left to the hooks of parameters here.
        """
        if batch.place.chunks > 1 and batch.config.no_sync_func is not None:
            chunk.gradient_sync.enable()
            chunk.model.start_grad_sync()

    def _forward(self, task: Task, batch: _Batch, chunk: _Chunk) -> None:
        microbatch = task.microbatch
        starts, ends = self._starts(task), self._ends(task, batch)
        input_tensor = None if starts else self._input(task, batch)
        several = batch.place.chunks > 1
        if several and microbatch == 0:
            self._gather_parameters(batch, task.chunk + 1)
        self._random_states.begin(self._iteration(), microbatch, task.chunk)
        output, num_tokens = schedules.forward_step(
            batch.forward_step_func,
            chunk.data_iterator,
            chunk.model,
            batch.num_microbatches,
            input_tensor,
            batch.losses,
            batch.config,
            cp_group_size=batch.groups.cp.size(),
            collect_non_loss_data=batch.collect_non_loss_data,
            checkpoint_activations_microbatch=self._checkpoints(task, batch),
            is_first_microbatch=schedules.check_first_val_step(
                batch.first_val_step, batch.forward_only, microbatch == 0
            ),
            current_microbatch=microbatch,
            vp_stage=task.chunk if several else None,
            is_last_stage=ends,
        )
        if batch.config.calculate_per_token_loss:
            batch.total_num_tokens += num_tokens
        result = output.detach()
        if not batch.forward_only:
            chunk.inputs[microbatch] = input_tensor
            chunk.outputs[microbatch] = output
            # The result holds the output's memory; the graph needs only its history.
            schedules.deallocate_output_tensor(output, batch.config.deallocate_pipeline_outputs)
        if not ends:
            wraps = self._stage == self._depth - 1
            self._send(Direction.FORWARD, task, task.chunk + wraps, batch, result)

    def _gather_parameters(self, batch: _Batch, chunk: int) -> None:
        """Start to gather a chunk's parameters while the one before it first runs."""
        functions = None if batch.forward_only else batch.config.param_sync_func
        if isinstance(functions, list) and chunk < len(functions):
            functions[chunk](batch.chunks[chunk].model.parameters())

    def _backward(self, task: Task, batch: _Batch, chunk: _Chunk) -> None:
        gradient = None if self._ends(task, batch) else self._input(task, batch)
        input_gradient = schedules.backward_step(
            chunk.inputs.pop(task.microbatch),
            chunk.outputs.pop(task.microbatch),
            gradient,
            batch.config,
        )
        if not self._starts(task):
            wraps = self._stage == 0
            self._send(Direction.BACKWARD, task, task.chunk - wraps, batch, input_gradient)

    def _starts(self, task: Task) -> bool:
        """Whether the model begins with the task's chunk."""
        return self._stage == 0 and task.chunk == 0

    def _ends(self, task: Task, batch: _Batch) -> bool:
        """Whether the model ends with the task's chunk."""
        return self._stage == self._depth - 1 and task.chunk == batch.place.chunks - 1

    def _checkpoints(self, task: Task, batch: _Batch) -> bool | None:
        """Whether all layers of this forward are checkpointed, where only some are to be.

        Megatron's own rule, whatever the order here: as many forwards as 1F1B may have under way
        on this stage form a window, and the last ones of each window are checkpointed.
        """
        partial = batch.config.num_microbatches_with_partial_activation_checkpoints
        if partial is None:
            return None
        place, number = batch.place, task.microbatch
        ahead = place.depth - place.stage - 1
        if place.chunks > 1:
            size = batch.config.microbatch_group_size_per_vp_stage
            first = number // size * size
            in_group = min(size, place.microbatches - first)
            number += (place.chunks - 1) * first + task.chunk * in_group
            ahead = 2 * ahead + (place.chunks - 1) * size
        window = min(ahead, place.microbatches * place.chunks) + 1
        return bool(number % window >= partial)

    def _start_remaining_reductions(self, batch: _Batch) -> None:
        """As Megatron's schedules do after the last task, for what has not started yet."""
        for chunk in batch.chunks:
            if not chunk.gradient_sync.enabled:
                chunk.gradient_sync.enable()
                if batch.config.grad_sync_func is not None:
                    batch.config.grad_sync_func(chunk.model.parameters())

    def _finalize(self, batch: _Batch, force_all_reduce: bool | None) -> None:
        """Reduce gradients over replicas and tied embeddings, as Megatron's schedules do."""
        tokens = batch.total_num_tokens if batch.config.calculate_per_token_loss else None
        try:
            batch.config.finalize_model_grads_func(
                [chunk.model for chunk in batch.chunks],
                tokens,
                pg_collection=batch.groups,
                force_all_reduce=force_all_reduce,
            )
        except RuntimeError as error:
            raise PipelineError(self.explain(error)) from error

    # Messages.

    def _sent(self) -> int:
        return self._links.sent(Direction.FORWARD)

    def _send(
        self,
        direction: Direction,
        task: Task,
        chunk: int,
        batch: _Batch,
        tensor: torch.Tensor | None,
    ) -> None:
        """Send a result to the neighbour's `chunk`."""
        dtype, shape = describe(tensor)
        header = Header(batch.number, direction, task.microbatch, chunk, dtype, shape)
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
            task = Task(Kind(header.direction), header.microbatch, header.chunk)
            try:
                self._agreement.arrived(batch.arbiter, task)
            except ValueError as error:
                raise PipelineError(f"{self.where()}: {error}") from error
            batch.statistics.arrived.append(
                MessageTime(header, message.arrived or time.perf_counter())
            )
            batch.arrived[task] = message.tensor
        if batch.forward_only:
            sent = self._sent()
            self._agreement.released(batch.arbiter, sent - batch.sent)
            batch.sent = sent

    def _input(self, task: Task, batch: _Batch) -> torch.Tensor | None:
        tensor = batch.arrived.pop(task)
        self._links.consumed(Direction(task.kind))
        if task.kind is FORWARD and tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_()
        return tensor

    # Waiting, and what to say when it does not end.

    def _flush(self, batch: _Batch) -> None:
        """Wait until the neighbours have taken what this stage sent."""
        with self._telling_of_termination(batch, self._takers):
            flushed = self._links.flush(self.config.timeout_s)
        if not flushed:
            raise PipelineError(
                f"{self.where()}: {self._no_progress()} while waiting for {self._takers(batch)}"
            )

    def _wait(self, batch: _Batch) -> None:
        with self._telling_of_termination(batch, self._awaited):
            happened = self._agreement.wait(self._links, self.config.timeout_s)
        if not happened:
            raise PipelineError(
                f"{self.where()}: {self._no_progress()} while waiting for "
                f"{self._awaited(batch)}; that rank, or one that it waits for, hangs or is slower "
                "than this limit allows"
            )

    @contextlib.contextmanager
    def _telling_of_termination(
        self, batch: _Batch, awaited: Callable[[_Batch], str]
    ) -> Iterator[None]:
        """On SIGTERM say what was awaited: launchers end the peers of a dead rank with it.

        Only while waiting here, and only if nobody else handles the signal: inside a collective
        a Python handler would keep the default action from ending the process.
        """

        def tell(number: int, _: object) -> None:
            line = f"{self.where()}: ended by SIGTERM while waiting for {awaited(batch)}"
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
        batch = f"iteration {self._iteration() + 1}" + ", evaluation" * self._evaluating
        return f"stage {self._stage} of {self._depth} (rank {rank}), {batch}"

    def _no_progress(self) -> str:
        return f"no progress for {self.config.timeout_s:g} s (--rrfp-timeout)"

    def _peer(self, stage: int) -> str:
        return f"stage {stage} (rank {self._ranks[stage]})"

    def _awaited(self, batch: _Batch) -> str:
        waits = []
        for task in batch.arbiter.awaited():
            if task in batch.arrived:
                continue  # but not yet on the ranks that run the same tasks
            direction = Direction(task.kind)
            step = 1 if direction is Direction.BACKWARD else -1
            where = f" on chunk {task.chunk}" if batch.place.chunks > 1 else ""
            waits.append(
                f"the {direction.payload} of microbatch {task.microbatch}{where} from "
                + self._peer((self._stage + step) % self._depth)
            )
        if others := self._agreement.awaited():
            waits.append(others)
        return " or ".join(waits) or self._takers(batch)

    def _takers(self, batch: _Batch) -> str:
        steps = (1,) if batch.forward_only else (-1, 1)
        stages = {(self._stage + step) % self._depth for step in steps}
        if batch.place.chunks == 1:  # else the stages form a ring
            stages = {stage for stage in stages if abs(stage - self._stage) == 1}
        return f"{' or '.join(map(self._peer, sorted(stages)))} to take the results sent to it"

    def _companions(self) -> str:
        """The other ranks that run the same tasks, and wait for this one in their collectives."""
        mine = self._ranks[self._stage]
        others = [str(rank) for rank in self._agreement.ranks if rank != mine]
        return f"rank {' and '.join(others)}"

    def explain(self, error: BaseException) -> str:
        """What to say of an error that a task, or Megatron between two batches, raised."""
        step, function = _place_in_megatron(error)
        others = "other ranks"
        if self._running is not None:
            what = f"failed in the {self._running} in {function}"
            if len(self._agreement.ranks) > 1:
                others = self._companions()
        else:
            place = step if step == function else f"{step} > {function}"
            what = f"all tasks of the batch are done here; failed in {place}"
        advice = ""
        if _is_of_a_collective(error):
            what += f", waiting for {others}"
            advice = "; look for the first error of all ranks"
        return f"{self.where()}: {what} ({type(error).__name__}: {_first_line(error)}){advice}"

    def _lost_peer(self, batch: _Batch, error: TransportError) -> PipelineError:
        act = "sending to" if error.sending else "receiving from"
        return PipelineError(
            f"{self.where()}: lost {self._peer(error.peer)} while waiting for "
            f"{self._awaited(batch)} ({act} it: {error}); look for the first error of that rank"
        )


class _GradientSync(contextlib.AbstractContextManager["_GradientSync"]):
    """Keeps the data-parallel reduction of a chunk off until its gradients are complete."""

    def __init__(self, config: Any, chunk: int) -> None:
        no_sync = config.no_sync_func
        if isinstance(no_sync, list):
            no_sync = no_sync[chunk]
        self._no_sync = no_sync or contextlib.nullcontext
        self._stack = contextlib.ExitStack()
        self.enabled = True

    def __enter__(self) -> _GradientSync:
        self._stack.enter_context(self._no_sync())
        self.enabled = False
        return self

    def enable(self) -> None:
        """Let reductions start."""
        self._stack.close()
        self.enabled = True

    def __exit__(self, *_: object) -> None:
        self.enable()


def _default_groups() -> Any:
    wanted = ["tp", "cp", "ep", "expt_tp", "embd", "pos_embd", "pp", "dp", "dp_cp", "tp_dp_cp"]
    known = {field.name for field in fields(ProcessGroupCollection)}
    return ProcessGroupCollection.use_mpu_process_groups([n for n in wanted if n in known])


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether other ranks are to blame; gloo's errors have no type of their own."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "pair closure" in text)
    )


def _place_in_megatron(error: BaseException) -> tuple[str, str]:
    """The step of Megatron's training loop that raised `error`, and its innermost function."""
    calls = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    functions = [name for module, name in calls if module.startswith("megatron.")]
    steps = [name for module, name in calls if module.startswith("megatron.training.")]
    functions = functions or [calls[-1][1] if calls else "the script"]
    return (steps or functions[:1])[-1], functions[-1]
