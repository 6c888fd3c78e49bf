"""The arbiter of a stage: what is ready, what may start, what runs next.

Pure Python over integers: no tensors, no messages, no clock. The runtime feeds it arrivals and
completed tasks; so does every test and simulation, so that there is one set of rules.
"""

from __future__ import annotations

from megatron_ext.pipeline.hints import Hint, ReadySet
from megatron_ext.pipeline.task import Direction, Task


class Arbiter:
    """Decides the order of one batch's tasks on one stage.

    Forwards keep microbatch order among themselves, and so do backwards; only how the two
    interleave depends on what arrives when. Messages may arrive in any order.

    A forward starts only while ``live < live_limit``. Live are the microbatches whose forward is
    done and whose memory is still held: until their backward in training; in a forward-only
    batch, until the next stage took the output (`released`).
    """

    def __init__(
        self,
        *,
        num_microbatches: int,
        live_limit: int,
        hint: Hint,
        is_first_stage: bool,
        is_last_stage: bool,
        forward_only: bool = False,
    ) -> None:
        if live_limit < 1:
            raise ValueError(f"live limit {live_limit} lets no forward start")
        self.num_microbatches = num_microbatches
        self.live_limit = live_limit
        self.live = 0
        self.peak_live = 0
        self._hint = hint
        self._is_first_stage = is_first_stage
        self._is_last_stage = is_last_stage
        self._forward_only = forward_only
        self._forwards = 0  # done, and so the number of the next one
        self._backwards = 0
        self._activations: set[int] = set()  # arrived, not yet used
        self._gradients: set[int] = set()
        self._ready = ReadySet()

    @property
    def finished(self) -> bool:
        """Whether every task of the batch is done."""
        return self._forwards == self.num_microbatches and (
            self._forward_only or self._backwards == self.num_microbatches
        )

    @property
    def ready_count(self) -> int:
        """How many tasks the last `choose` had to choose from."""
        return (self._ready.forward is not None) + (self._ready.backward is not None)

    def arrived(self, direction: Direction, microbatch: int) -> None:
        """Note that the input of a task is here.

        Raises:
            ValueError: The stage does not expect this input, or has had it already.
        """
        forward = direction is Direction.FORWARD
        done = self._forwards if forward else self._backwards
        waiting = self._activations if forward else self._gradients
        local = self._is_first_stage if forward else self._is_last_stage or self._forward_only
        if local or microbatch in waiting or not done <= microbatch < self.num_microbatches:
            raise ValueError(f"unexpected {direction.payload} of microbatch {microbatch}")
        waiting.add(microbatch)

    def choose(self) -> Task | None:
        """The task to run now, or None if nothing is ready."""
        ready = self._ready
        forwards, backwards = self._forwards, self._backwards
        ready.forward = (
            Task(Direction.FORWARD, forwards)
            if forwards < self.num_microbatches
            and self.live < self.live_limit
            and (self._is_first_stage or forwards in self._activations)
            else None
        )
        ready.backward = (
            Task(Direction.BACKWARD, backwards)
            if backwards < forwards
            and not self._forward_only
            and (self._is_last_stage or backwards in self._gradients)
            else None
        )
        if ready.forward is None and ready.backward is None:
            return None
        return self._hint(ready)

    def completed(self, task: Task) -> None:
        """Note that `task`, the last one chosen, has run."""
        if task.direction is Direction.FORWARD:
            assert task.microbatch == self._forwards
            self._forwards += 1
            self._activations.discard(task.microbatch)
            # The last stage's output of a forward-only batch is used up at once.
            self.live += not (self._forward_only and self._is_last_stage)
            self.peak_live = max(self.peak_live, self.live)
        else:
            assert task.microbatch == self._backwards
            self._backwards += 1
            self._gradients.discard(task.microbatch)
            self.live -= 1
        self._ready.last = task.direction

    def released(self, count: int) -> None:
        """Note that `count` more outputs of a forward-only batch left this stage."""
        self.live -= count

    def awaited(self) -> list[Task]:
        """The tasks whose input a stage with nothing ready is waiting for."""
        tasks = []
        if self._forwards < self.num_microbatches and self.live < self.live_limit:
            tasks.append(Task(Direction.FORWARD, self._forwards))
        if self._backwards < self._forwards and not self._forward_only:
            tasks.append(Task(Direction.BACKWARD, self._backwards))
        return tasks
