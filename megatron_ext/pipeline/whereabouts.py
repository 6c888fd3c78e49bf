"""Where a stage is and what it waits for, in words: what every error of a pipeline says."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch.distributed as dist

from megatron_ext.errors import PipelineError
from megatron_ext.pipeline.agreement import Agreement
from megatron_ext.pipeline.batch import Run
from megatron_ext.pipeline.task import Direction, Kind, Task
from megatron_ext.pipeline.transport.base import TransportError


class Whereabouts:
    """Of one stage.

    Args:
        stage: This stage's number.
        ranks: The ranks of the pipeline, stage by stage.
        agreement: How this rank agrees with those that run the same tasks.
        iteration: Gives the number of the training iteration under way, from 0.
        timeout_s: Longest wait.
    """

    def __init__(
        self,
        stage: int,
        ranks: list[int],
        agreement: Agreement,
        iteration: Callable[[], int],
        timeout_s: float,
    ) -> None:
        self._stage, self._depth = stage, len(ranks)
        self._ranks = ranks
        self._agreement = agreement
        self._iteration = iteration
        self._timeout_s = timeout_s
        self.evaluating = False
        self.updating = False
        self.running: Task | None = None
        """The task under way, by its microbatch's number in its batch."""

    def where(self) -> str:
        """This stage, rank and iteration."""
        rank = self._ranks[self._stage]
        batch = f"iteration {self._iteration() + 1}" + ", evaluation" * self.evaluating
        return f"stage {self._stage} of {self._depth} (rank {rank}), {batch}"

    def no_progress(self) -> str:
        """Why a wait is given up."""
        return f"no progress for {self._timeout_s:g} s (--rrfp-timeout)"

    def awaited(self, run: Run) -> str:
        """What would let this stage go on."""
        waits = []
        for task in run.arbiter.awaited():
            if task in run.arrived:
                continue  # but not yet on the ranks that run the same tasks
            direction = Direction(task.kind)
            step = 1 if direction is Direction.BACKWARD else -1
            where = f" on chunk {task.chunk}" if run.place.chunks > 1 else ""
            waits.append(
                f"the {direction.payload} of microbatch {run.name(task).microbatch}{where} from "
                + self._peer((self._stage + step) % self._depth)
            )
        if self.updating:
            waits.append("the other ranks to reduce gradients and their norm")
        if others := self._agreement.awaited():
            waits.append(others)
        return " or ".join(waits) or self.takers(run)

    def takers(self, run: Run) -> str:
        """Who has not taken what was sent."""
        steps = (1,) if run.forward_only else (-1, 1)
        stages = {(self._stage + step) % self._depth for step in steps}
        if run.place.chunks == 1:  # else the stages form a ring
            stages = {stage for stage in stages if abs(stage - self._stage) == 1}
        return f"{' or '.join(map(self._peer, sorted(stages)))} to take the results sent to it"

    def companions(self) -> str:
        """The other ranks that run the same tasks, and wait for this one in their collectives."""
        mine = self._ranks[self._stage]
        others = [str(rank) for rank in self._agreement.ranks if rank != mine]
        return f"rank {' and '.join(others)}"

    def lost_peer(self, run: Run, error: TransportError) -> PipelineError:
        """What to raise where a link broke."""
        act = "sending to" if error.sending else "receiving from"
        return PipelineError(
            f"{self.where()}: lost {self._peer(error.peer)} while waiting for "
            f"{self.awaited(run)} ({act} it: {error}); look for the first error of that rank"
        )

    def lost_companion(self, run: Run, error: Exception) -> PipelineError:
        """What to raise where a rank that runs the same tasks is gone."""
        return PipelineError(
            f"{self.where()}: lost a rank that runs the same tasks while waiting for "
            f"{self.awaited(run)} ({first_line(error)}); look for the first error of "
            f"{self.companions()}"
        )

    def explain(self, error: BaseException) -> str:
        """What to say of an error that a task, or Megatron between two batches, raised."""
        step, function = _place_in_megatron(error)
        others = "other ranks"
        if self.running is not None and self.running.kind is Kind.UPDATE:
            what = f"failed in the update of the weights, in {function}"
        elif self.running is not None:
            what = f"failed in the {self.running} in {function}"
            if len(self._agreement.ranks) > 1:
                others = self.companions()
        else:
            place = step if step == function else f"{step} > {function}"
            what = f"all tasks of the batch are done here; failed in {place}"
        advice = ""
        if _is_of_a_collective(error):
            what += f", waiting for {others}"
            advice = "; look for the first error of all ranks"
        return f"{self.where()}: {what} ({type(error).__name__}: {first_line(error)}){advice}"

    def _peer(self, stage: int) -> str:
        return f"stage {stage} (rank {self._ranks[stage]})"


def first_line(error: BaseException) -> str:
    """An error's message, without what follows its first line."""
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
