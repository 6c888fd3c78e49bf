"""The stage executor: Megatron's forward-backward function, driven by readiness.

`StageExecutor` is called like the schedules in `megatron.core.pipeline_parallel.schedules` and
leaves behind what they leave: the same losses, gradients and finalised buffers. What differs is
who decides the order: the arbiter, from what has arrived, instead of a list fixed beforehand.

With two weight versions (`megatron_ext.pipedream_2bw`) a call also runs tasks of the next batch,
and returns when its own batch's update is done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_ext.arguments import RrfpConfig
from megatron_ext.errors import PipelineError, UsageError
from megatron_ext.pipedream_2bw.delayed_updates import DelayedUpdates
from megatron_ext.pipedream_2bw.shadow_groups import make_shadows
from megatron_ext.pipeline.agreement import Agreement, AgreementError, Alone, agree
from megatron_ext.pipeline.arbiter import Arbiter
from megatron_ext.pipeline.batch import Batch, Chunk, GradientSync, Run
from megatron_ext.pipeline.batch_statistics import BatchStatistics, Load, UpdateFacts
from megatron_ext.pipeline.compute import Compute
from megatron_ext.pipeline.device_queue import DeviceQueue, DeviceStuckError
from megatron_ext.pipeline.hints import BackwardForward, Place, find_hint
from megatron_ext.pipeline.jitter import Jitter
from megatron_ext.pipeline.live_limit import parse_live_limit, tapered
from megatron_ext.pipeline.messages import Messages
from megatron_ext.pipeline.peak_memory import peak_memory
from megatron_ext.pipeline.random_state import RandomStates
from megatron_ext.pipeline.run_facts import RunFacts
from megatron_ext.pipeline.task import Direction, Kind, Task
from megatron_ext.pipeline.trace import RankPlace, Trace
from megatron_ext.pipeline.transport.base import TransportError
from megatron_ext.pipeline.transport.choose import open_links
from megatron_ext.pipeline.waiting import Waiting
from megatron_ext.pipeline.weight_grad import WeightGradients
from megatron_ext.pipeline.whereabouts import Whereabouts

FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


class StageExecutor:
    """Runs the batches of one pipeline stage; lives as long as the process.

    Args:
        config: The pipeline's settings.
        seed: Seed of the random states of this stage's forwards.
        iteration: Gives the number of the training iteration under way, from 0.
        jitter: Gives the delays to inject on this stage; None for none.
        delayed: Gives the stage's two weight versions; None where training is not delayed.
        facts: What a trace is to say of the run.
    """

    def __init__(
        self,
        config: RrfpConfig,
        *,
        seed: int,
        iteration: Callable[[], int],
        jitter: Callable[[], Jitter | None] = lambda: None,
        delayed: Callable[[], DelayedUpdates | None] = lambda: None,
        facts: RunFacts | None = None,
    ) -> None:
        self.config = config
        self.statistics: BatchStatistics | None = None
        self._hint = find_hint(config.hint)
        self._seed = seed
        self._iteration = iteration
        self._jitter = jitter
        self._delayed = delayed
        self._facts = facts or RunFacts()
        self._trace: Trace | None = None
        self._runs = 0
        self._unfinished: Run | None = None
        """The run whose next batch has begun, between two calls."""

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
        run = None if forward_only else self._unfinished
        if run is None:
            run = self._begin_run(
                forward_step_func=forward_step_func,
                chunks=[
                    Chunk(
                        chunk,
                        iterator,
                        GradientSync(contextlib.nullcontext),
                        WeightGradients(chunk),
                    )
                    for chunk, iterator in zip(models, iterators, strict=True)
                ],
                groups=groups,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
            )
        batch = run.batch
        if batch.microbatches != num_microbatches:
            raise PipelineError(
                f"{self._whereabouts.where()}: this batch began with {batch.microbatches} "
                f"microbatches, and now it is to have {num_microbatches}"
            )
        self._whereabouts.evaluating = forward_only
        statistics = run.statistics = BatchStatistics(
            forward_only,
            number=run.number,
            iteration=self._iteration() + 1,
            first_microbatch=batch.first,
            microbatches=batch.microbatches,
        )
        config = run.config
        with self._traced(statistics):
            if config.timers is not None:
                config.timers("forward-backward", log_level=1).start(
                    barrier=config.barrier_with_L1_time
                )
            delayed = None if forward_only else self._delayed()
            if delayed is not None and delayed.delays(batch.iteration):
                statistics.weight_lag = delayed.lag(batch.iteration)
                self._run_delayed(run, delayed, force_all_reduce)
            else:
                self._run_flushed(run, force_all_reduce)
            if config.timers is not None:
                config.timers("forward-backward").stop()
        self.statistics = statistics
        self._whereabouts.evaluating = False
        run.batches.popleft()
        if not forward_only:
            self._unfinished = run if run.batches else None
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

    @property
    def under_way(self) -> bool:
        """Whether the next batch has begun, between two calls."""
        return self._unfinished is not None

    def explain(self, error: BaseException) -> str:
        """What to say of an error that a task, or Megatron between two batches, raised."""
        return self._whereabouts.explain(error)

    def _connect(self, groups: Any, models: list[Any]) -> None:
        """Learn this stage's place and open its links, once."""
        if self.connected:
            return
        ranks = dist.get_process_group_ranks(groups.pp)
        self._ranks = ranks
        self._depth = len(ranks)
        self._stage = groups.pp.rank()
        self._live_limit = parse_live_limit(
            self.config.live_limit or self._hint.live_limit, self._depth
        )
        on_gpu = any(parameter.is_cuda for parameter in models[0].parameters())
        self._device = torch.device(torch.cuda.current_device() if on_gpu else "cpu")
        if self.config.trace is not None:
            place = RankPlace(ranks[self._stage], dist.get_world_size(), self._stage, ranks)
            self._trace = Trace(
                self.config.trace,
                place,
                timeout_s=self.config.timeout_s,
                facts=self._facts_of(len(models), groups),
            )
        self._random_states = RandomStates(self._seed, self._device)
        self._device_queue = DeviceQueue(self._device, self.config.timeout_s)
        self._agreement: Agreement = agree(groups, len(models), self.config.timeout_s)
        self._shares_tasks = not isinstance(self._agreement, Alone)
        self._whereabouts = Whereabouts(
            self._stage, ranks, self._agreement, self._iteration, self.config.timeout_s
        )
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
        self._messages = Messages(self._links, self._agreement, self._whereabouts, self._is_delayed)
        self._waiting = Waiting(
            self._links, self._agreement, self._whereabouts, self._trace, self.config.timeout_s
        )
        self._compute = Compute(
            self._stage,
            self._depth,
            random_states=self._random_states,
            take_input=self._messages.input_of,
            send=self._messages.send,
        )
        if self._delayed() is not None:
            make_shadows(getattr(groups, name, None) for name in ("tp", "cp", "ep", "expt_tp"))

    def _limit(self, chunks: int) -> int:
        """The most microbatches that this stage may hold in training."""
        if self._hint.tapers and chunks == 1:
            return tapered(self._live_limit, self._stage, self._depth)
        return self._live_limit

    def _facts_of(self, chunks: int, groups: Any) -> RunFacts:
        """What this stage's trace says of the run."""
        tensor_parallel = getattr(groups, "tp", None)
        settings = {
            "hint": self.config.hint,
            "live limit": self._limit(chunks),
            "chunks": chunks,
            "transport": self.config.transport,
            "tensor parallel": tensor_parallel.size() if tensor_parallel is not None else 1,
            **self._facts.settings,
        }
        return replace(self._facts, settings=settings, memory=peak_memory(self._device))

    def _begin_run(
        self,
        *,
        forward_step_func: Callable[..., Any],
        chunks: list[Chunk],
        groups: Any,
        num_microbatches: int,
        forward_only: bool,
        collect_non_loss_data: bool,
        first_val_step: bool | None,
    ) -> Run:
        """A run with its first batch, whose messages may come in."""
        limit = self._live_limit if forward_only else self._limit(len(chunks))
        place = Place(self._stage, self._depth, num_microbatches, limit, chunks=len(chunks))
        try:
            # Without backwards nothing is left to rank, and a fixed order would wait for them.
            hint = BackwardForward(place) if forward_only else self._hint(place)
        except ValueError as error:
            raise UsageError(f"--rrfp-hint {self.config.hint}: {error}") from None
        run = Run(
            number=self._runs,
            forward_step_func=forward_step_func,
            chunks=chunks,
            config=get_model_config(chunks[0].model),
            groups=groups,
            place=place,
            forward_only=forward_only,
            weight_pieces=hint.weight_pieces if hint.splits_weight and not forward_only else 0,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            arbiter=Arbiter(place, hint, forward_only=forward_only),
            statistics=BatchStatistics(forward_only),
            sent=self._messages.sent,
        )
        self._runs += 1
        self._begin_batch(run, self._iteration(), num_microbatches)
        self._agreement.start(run.arbiter)
        if forward_only and self._unfinished is not None:
            self._messages.free_buffers(self._unfinished)
        self._messages.begin(run)
        return run

    def _begin_batch(self, run: Run, iteration: int, microbatches: int) -> None:
        first = run.batches[-1].end if run.batches else 0
        tokens = torch.zeros([], dtype=torch.int, device=self._device)
        run.batches.append(Batch(iteration, first, microbatches, tokens))
        delayed = self._delayed()
        if delayed is not None and not run.forward_only and delayed.delays(iteration):
            delayed.begin_batch(iteration)
        place = run.place
        for direction, edge in ((Direction.FORWARD, 0), (Direction.BACKWARD, place.depth - 1)):
            # At the model's ends one chunk gets its input from the data or the loss.
            chunks = place.chunks - (place.stage == edge)
            if chunks and not (direction is Direction.BACKWARD and run.forward_only):
                self._links.expect(direction, chunks * microbatches)

    # One batch.

    def _run_flushed(self, run: Run, force_all_reduce: bool | None) -> None:
        """Run a batch alone, and leave it as Megatron's schedules do."""
        with contextlib.ExitStack() as stack:
            self._hold_reductions(run, stack)
            self._run_tasks(run, lambda: run.arbiter.finished)
            self._waiting.for_takers(run)
            if run.forward_only:  # all that left is counted alike on ranks that agree
                self._messages.take(run, self._unfinished)
            else:
                self._start_remaining_reductions(run)
        if not run.forward_only:
            with run.statistics.timed(run.statistics.reductions):
                try:
                    self._finalize(run, run.batch, force_all_reduce)
                except RuntimeError as error:
                    raise PipelineError(self.explain(error)) from error

    def _run_delayed(
        self, run: Run, delayed: DelayedUpdates, force_all_reduce: bool | None
    ) -> None:
        """Run a batch to the end of its update, and of the next batch what is ready meanwhile."""
        batch, arbiter = run.batch, run.arbiter
        arbiter.must_end(batch.end, delayed.holds_backwards)
        if delayed.overlaps_next(batch.iteration, batch.microbatches):
            arbiter.extend(batch.microbatches)
            self._begin_batch(run, batch.iteration + 1, batch.microbatches)
        self._messages.accept_early(run)
        began: float | None = None

        def ended() -> bool:
            nonlocal began
            if began is None and arbiter.ended:
                began = time.perf_counter()
                delayed.begin_update(
                    batch.iteration,
                    lambda: self._finalize(run, batch, force_all_reduce),
                    self._links.wake,
                    self._device,
                )
            self._whereabouts.updating = delayed.updating
            if delayed.ready:
                self._whereabouts.running = Task(Kind.UPDATE, 0)
                with run.statistics.timed(run.statistics.updates):
                    done = delayed.drive()
                self._whereabouts.running = None
                if done:
                    assert began is not None
                    run.statistics.delayed_update = UpdateFacts(
                        began, time.perf_counter(), delayed.version_lag, delayed.grad_norm
                    )
                    self._agreement.updated(arbiter)
            return False

        with contextlib.ExitStack() as stack:
            self._hold_reductions(run, stack)
            self._run_tasks(run, ended, delayed)
            if len(run.batches) == 1:
                self._waiting.for_takers(run)
        delayed.end_batch(batch.iteration)

    def _hold_reductions(self, run: Run, stack: contextlib.ExitStack) -> None:
        """Keep reductions off, and random states as they are, until the stack is left."""
        for number, chunk in enumerate(run.chunks):
            chunk.gradient_sync = GradientSync.of(run.config, number)
            stack.enter_context(chunk.gradient_sync)
        stack.enter_context(self._random_states.kept())

    def _traced(self, statistics: BatchStatistics) -> contextlib.AbstractContextManager[None]:
        return self._trace.batch(statistics) if self._trace else contextlib.nullcontext()

    def _jittered(self, task: Task) -> contextlib.AbstractContextManager[None]:
        """Forward and backward steps delay themselves by a hook; the time of others counts too."""
        jitter = self._jitter()
        delays_itself = task.kind in (FORWARD, BACKWARD)
        return jitter.around(task) if jitter and not delays_itself else contextlib.nullcontext()

    def _run_tasks(
        self, run: Run, ended: Callable[[], bool], delayed: DelayedUpdates | None = None
    ) -> None:
        """Run what is ready until `ended` says so or the batch's update is done."""
        arbiter, statistics, queue = run.arbiter, run.statistics, self._device_queue
        self._links.report_sent(run.forward_only)
        queue.begin_batch(timed=self._trace is not None and self._trace.holds(statistics))
        arbiter.peak_live = arbiter.live
        statistics.started = time.perf_counter()
        try:
            while not ended():
                queue.wait_for_room()
                self._messages.take(run, self._unfinished)
                started = time.perf_counter()
                task = self._agreement.choose(arbiter)
                decided = time.perf_counter()
                if self._trace:
                    statistics.loads.append(Load(decided, arbiter.ready.count, arbiter.live))
                if task is None:
                    if not (delayed and delayed.ready):
                        with statistics.waiting():
                            self._waiting.for_anything(run)
                    continue
                statistics.dispatch_s.append(decided - started)
                if self._shares_tasks:
                    statistics.agreement_s.append(decided - started)
                if task.kind is Kind.UPDATE:
                    arbiter.completed(task)
                    break
                if delayed is not None:
                    delayed.select(run.batch_of(task).iteration)
                self._whereabouts.running = run.name(task)
                with statistics.running(task), queue.running(task), self._jittered(task):
                    self.run_task(task, run)
                self._whereabouts.running = None
                arbiter.completed(task)
            statistics.device_tasks = queue.spans()
        except TransportError as error:
            raise self._whereabouts.lost_peer(run, error) from error
        except AgreementError as error:
            raise self._whereabouts.lost_companion(run, error) from error
        except DeviceStuckError as error:
            raise PipelineError(
                f"{self._whereabouts.where()}: {self._whereabouts.no_progress()}: {error}; a "
                "kernel hangs, or a collective waits for another rank: look for the first error "
                "of all ranks"
            ) from error
        finally:
            statistics.ended = time.perf_counter()
            statistics.peak_live = arbiter.peak_live

    def run_task(self, task: Task, run: Run) -> None:
        """Run one task on its model chunk and hand its result to the neighbour."""
        # Where another batch follows at once, the update sees to the reductions.
        self._compute.run(task, run, reduces=not self._is_delayed(run))

    def _is_delayed(self, run: Run) -> bool:
        delayed = None if run.forward_only else self._delayed()
        return delayed is not None and delayed.delays(run.batch.iteration)

    def _start_remaining_reductions(self, run: Run) -> None:
        """As Megatron's schedules do after the last task, for what has not started yet."""
        for chunk in run.chunks:
            if not chunk.gradient_sync.enabled:
                chunk.gradient_sync.enable()
                if run.config.grad_sync_func is not None:
                    run.config.grad_sync_func(chunk.model.parameters())

    def _finalize(self, run: Run, batch: Batch, force_all_reduce: bool | None) -> None:
        """Reduce gradients over replicas and tied embeddings, as Megatron's schedules do."""
        if run.config.finalize_model_grads_func is not None:
            run.config.finalize_model_grads_func(
                [chunk.model for chunk in run.chunks],
                batch.total_num_tokens if run.config.calculate_per_token_loss else None,
                pg_collection=run.groups,
                force_all_reduce=force_all_reduce,
            )


def _default_groups() -> Any:
    wanted = ["tp", "cp", "ep", "expt_tp", "embd", "pos_embd", "pp", "dp", "dp_cp", "tp_dp_cp"]
    known = {field.name for field in fields(ProcessGroupCollection)}
    return ProcessGroupCollection.use_mpu_process_groups([n for n in wanted if n in known])
