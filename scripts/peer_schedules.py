"""The schedules that `bench_peers.py` compares: Megatron's, PyTorch's and ours, on one stage.

Each is built once per process and runs one batch per call on `EmulatedChunk`s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from emulated_stage import (
    HIDDEN_SIZE,
    SEQUENCE_LENGTH,
    EmulatedChunk,
    Meter,
    Work,
    first_input,
    forward_step,
)
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as pytorch

from megatron_ext.arguments import RrfpConfig
from megatron_ext.pipeline.hints import find_hint
from megatron_ext.pipeline.stage import StageExecutor

MEGATRON, PYTORCH, OURS = "Megatron", "PyTorch", "RRFP"


@dataclass(frozen=True)
class Policy:
    """A schedule under test."""

    family: str
    """MEGATRON, PYTORCH or OURS."""
    schedule: str
    """Name of the schedule, or our hint."""
    chunks: int = 1
    v_shaped: bool = False
    """Whether the last chunk is on the first rank: 0 1 2 3 3 2 1 0, else 0 1 2 3 0 1 2 3."""
    live_limit: str | None = None
    """Ours only."""

    @property
    def name(self) -> str:
        """As shown in the tables."""
        limit = f" at {self.live_limit}" if self.live_limit else ""
        chunks = f", {self.chunks} chunks" if self.family == OURS and self.chunks > 1 else ""
        return f"{self.family} {self.schedule}{limit}{chunks}"


PEERS = (
    Policy(MEGATRON, "1F1B"),
    Policy(MEGATRON, "interleaved 1F1B", chunks=2),
    Policy(PYTORCH, "1F1B"),
    Policy(PYTORCH, "Interleaved1F1B", chunks=2),
    Policy(PYTORCH, "InterleavedZeroBubble", chunks=2),
    Policy(PYTORCH, "ZBVZeroBubble", chunks=2, v_shaped=True),
    Policy(PYTORCH, "DualPipeV", chunks=2, v_shaped=True),
)


def ours(stages: int) -> tuple[Policy, ...]:
    """Our schedules, at the memory that the peers take."""
    interleaved = (3 * stages - 1) // 2  # what interleaved 1F1B holds with two chunks
    return (
        Policy(OURS, "bfw-pieces", live_limit="p"),
        Policy(OURS, "bfw-pieces", live_limit=str(interleaved)),
        Policy(OURS, "bfw-pieces", live_limit="2p"),
        Policy(OURS, "bfw-pieces", live_limit="p", chunks=2),
        Policy(OURS, "bfw-pieces", live_limit=str(interleaved), chunks=2),
    )


def closed_form_s(policy: Policy, stages: int, microbatches: int, task_s: float) -> float | None:
    """Makespan with equal tasks, no delays and messages that take no time; None where not given.

    Args:
        policy: Which schedule.
        stages: Number of ranks.
        microbatches: Of the batch.
        task_s: Forward and backward of a microbatch on a whole stage.
    """
    if policy.family == OURS or "1F1B" not in policy.schedule:
        return None
    return task_s * (microbatches + (stages - 1) / policy.chunks)


class Runner:
    """One policy on one rank.

    Args:
        policy: Which schedule.
        rank: Of this process in the pipeline.
        stages: Number of ranks.
        microbatches: Of every batch.
        group: For PyTorch's messages, so that they meet no others.
    """

    def __init__(
        self, policy: Policy, rank: int, stages: int, microbatches: int, group: Any
    ) -> None:
        self.policy = policy
        self.order: dict[int, list[Any]] | None = None
        """PyTorch's list of actions by rank, where the schedule has one."""
        self._rank = rank
        several = policy.chunks > 1
        config = TransformerConfig(
            num_layers=stages * policy.chunks,
            hidden_size=HIDDEN_SIZE,
            num_attention_heads=4,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=policy.chunks if several else None,
            microbatch_group_size_per_vp_stage=stages,
            # Megatron's training loop overlaps messages and tasks where there are chunks.
            overlap_p2p_comm=several,
            batch_p2p_comm=not several,
            pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=True,
        )
        splits = policy.family == PYTORCH and "1F1B" not in policy.schedule
        self.chunks = [
            EmulatedChunk(
                config,
                vp_stage=chunk if several else None,
                leaves_weight_gradients=splits,
                layers=find_hint(policy.schedule).weight_pieces if policy.family == OURS else 1,
            )
            for chunk in range(policy.chunks)
        ]
        self._step: Callable[[], None] = (
            self._pytorch(stages, microbatches, group, splits)
            if policy.family == PYTORCH
            else self._megatron_or_ours(microbatches)
        )

    def run(self, work: Work) -> Meter:
        """Run one batch."""
        meter = Meter(self.policy.chunks)
        for number, chunk in enumerate(self.chunks):
            chunk.begin(work.times(self._rank, number), meter)
        self._step()
        return meter

    def _megatron_or_ours(self, microbatches: int) -> Callable[[], None]:
        several = self.policy.chunks > 1
        schedule: Any
        if self.policy.family == OURS:
            settings = RrfpConfig(
                hint=self.policy.schedule, live_limit=self.policy.live_limit, timeout_s=120
            )
            schedule = StageExecutor(settings, seed=1, iteration=lambda: 0)
        elif several:
            schedule = forward_backward_pipelining_with_interleaving
        else:
            schedule = forward_backward_pipelining_without_interleaving

        def step() -> None:
            schedule(
                forward_step_func=forward_step,
                data_iterator=[None] * len(self.chunks) if several else None,
                model=self.chunks if several else self.chunks[0],
                num_microbatches=microbatches,
                seq_length=SEQUENCE_LENGTH,
                micro_batch_size=1,
                forward_only=False,
            )

        return step

    def _pytorch(
        self, stages: int, microbatches: int, group: Any, splits: bool
    ) -> Callable[[], None]:
        total = stages * self.policy.chunks
        sample = first_input()
        pieces = []
        for number, chunk in enumerate(self.chunks):
            turned = self.policy.v_shaped and number == 1
            index = total - 1 - self._rank if turned else number * stages + self._rank
            pieces.append(
                pipelining.PipelineStage(
                    chunk,
                    index,
                    total,
                    torch.device("cpu"),
                    input_args=sample if index == 0 else sample.clone().requires_grad_(),
                    output_args=sample.clone().requires_grad_(),
                    group=group,
                    # The documented way to split a backward, and the one that costs least.
                    dw_builder=chunk.take_weight_gradient if splits else None,
                )
            )
        make = getattr(pytorch, f"Schedule{self.policy.schedule}")
        schedule = make(
            pieces if issubclass(make, pytorch.PipelineScheduleMulti) else pieces[0],
            n_microbatches=microbatches,
            loss_fn=lambda output, _: output.mean(),
        )
        if isinstance(schedule, pytorch.PipelineScheduleMulti):
            self.order = schedule.pipeline_order
        holds_first = any(piece.is_first for piece in pieces)
        inputs = [(first_input(),) if holds_first else () for _ in range(microbatches)]
        targets = [torch.zeros(()) for _ in range(microbatches)]

        def step() -> None:
            schedule.step(arg_mbs=inputs, target_mbs=targets, losses=[], return_outputs=False)

        return step


def make_runners(
    policies: tuple[Policy, ...], rank: int, stages: int, microbatches: int
) -> list[Runner]:
    """All policies on this rank; the same calls on all ranks, for they make groups."""
    group = dist.new_group(list(range(stages)), backend="gloo")
    return [Runner(policy, rank, stages, microbatches, group) for policy in policies]
