"""The arbiter of a stage: what is ready, what may start, what runs next.

Pure Python over integers: no tensors, no messages, no clock. The runtime feeds it arrivals and
completed tasks; so does every test and simulation, so that there is one set of rules.
"""

from __future__ import annotations

from collections import deque

from megatron_ext.pipeline.hints import Hint, Place, ReadySet
from megatron_ext.pipeline.task import Direction, Kind, Task

FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


class Arbiter:
    """Decides the order of the tasks on one stage: of one batch, or of one batch after another.

    On each chunk the forwards keep microbatch order among themselves, and so do the backwards and
    the weight gradients; only how the three interleave depends on what arrives when. Messages may
    arrive in any order.

    Memory is bounded: live are the chunk activations that are held, from the forward to the
    backward, or to the weight gradient where that is a task of its own; in a forward-only batch,
    until the next stage took the output (`released`). They never exceed ``live_limit * chunks``.
    A hint may cut weight gradients into pieces: then the same task is chosen once for each.
    A microbatch that enters the stage reserves room for all its chunks, so it can always go on:
    that is why no limit deadlocks (docs/correctness.md).

    Where the pipeline does not drain between batches, microbatches are numbered on from batch to
    batch (`extend`), and `must_end` says where the batch ends that is to be finished first. Once
    its backwards are done and half of the next batch has entered, its weight gradients run before
    anything else, since its update waits for them. When the update is done too (`updated`), the
    choice is `Kind.UPDATE`.
    """

    def __init__(self, place: Place, hint: Hint, *, forward_only: bool = False) -> None:
        if place.live_limit < 1:
            raise ValueError(f"live limit {place.live_limit} lets no forward start")
        self.place = place
        self.live = 0
        self.peak_live = 0
        self._end = place.microbatches
        self._must_end = 0
        self._hold_backwards = False
        self._updates = 0
        # A fixed order bounds memory by itself, and a limit could only block it.
        unbounded = place.microbatches * place.chunks
        self._most_entered = unbounded if hint.fixed_order else place.live_limit
        self._most_live = unbounded if hint.fixed_order else place.live_limit * place.chunks
        self._hint = hint
        self._splits_weight = hint.splits_weight and not forward_only
        self._weight_pieces = hint.weight_pieces
        self._pieces_left = hint.weight_pieces  # of the oldest weight gradient
        self.forward_only = forward_only
        chunks = range(place.chunks)
        self._next_forwards = [Task(FORWARD, 0, chunk) for chunk in chunks]
        self._next_backwards = [Task(BACKWARD, 0, chunk) for chunk in chunks]
        # Inputs that have arrived and are not used yet.
        self._activations: list[set[int]] = [set() for _ in chunks]
        self._gradients: list[set[int]] = [set() for _ in chunks]
        # Where the model begins, inputs come from the data; where it ends, from the loss.
        ends_pipeline = place.stage == place.depth - 1
        self._starts = [place.stage == 0 and chunk == 0 for chunk in chunks]
        self._ends = [ends_pipeline and chunk == place.chunks - 1 for chunk in chunks]
        self._deferred: deque[Task] = deque()
        self._left = place.microbatches * place.chunks * (1 if forward_only else 2)
        self._ready = ReadySet()

    @property
    def finished(self) -> bool:
        """Whether every task of the batch is done."""
        return not self._left and not self._deferred

    @property
    def ready(self) -> ReadySet:
        """What the last `choose` could choose from."""
        return self._ready

    @property
    def end(self) -> int:
        """The first microbatch that is not to run yet."""
        return self._end

    def extend(self, microbatches: int) -> None:
        """Let that many more microbatches in."""
        self._end += microbatches
        self._left += microbatches * self.place.chunks * 2

    def must_end(self, microbatch: int, hold_backwards: bool = False) -> None:
        """Finish all microbatches before this one first.

        Args:
            microbatch: The first one of the next batch.
            hold_backwards: Whether the next batch's backwards wait for the call after this.
        """
        self._must_end = microbatch
        self._hold_backwards = hold_backwards

    @property
    def ended(self) -> bool:
        """Whether all tasks before `must_end` are done."""
        return self._backwards_ended() and not self._weight_is_due()

    def updated(self) -> None:
        """Note that the update of the batch before `must_end` is done."""
        self._updates += 1

    def arrived(self, direction: Direction, microbatch: int, chunk: int = 0) -> None:
        """Note that the input of a forward or backward is here.

        Raises:
            ValueError: The stage does not expect this input, or has had it already.
        """
        if 0 <= chunk < self.place.chunks:
            forwards = self._next_forwards[chunk].microbatch
            if direction is Direction.FORWARD:
                local, waiting = self._starts[chunk], self._activations[chunk]
                first, end = forwards, self._end
            else:
                local, waiting = self._ends[chunk] or self.forward_only, self._gradients[chunk]
                first, end = self._next_backwards[chunk].microbatch, forwards
            if not local and first <= microbatch < end and microbatch not in waiting:
                waiting.add(microbatch)
                return
        where = f" on chunk {chunk}" if chunk else ""
        raise ValueError(f"unexpected {direction.payload} of microbatch {microbatch}{where}")

    def choose(self) -> Task | None:
        """The task to run now, or None if nothing is ready."""
        # This runs before every task: no calls, and no objects that are not needed.
        ready = self._ready
        ready.forwards, ready.backwards = [], []
        if self._must_end:
            if self._updates:
                return Task(Kind.UPDATE, self._must_end)
            near = self._deferred and self._update_is_near()
            if near and self._backwards_ended() and self._weight_is_due():
                ready.weight = self._deferred[0]
                return ready.weight
        ready.weight = self._deferred[0] if self._deferred else None
        ready.full = self.live >= self._most_live
        if not ready.full:
            for chunk, task in enumerate(self._next_forwards):
                if task.microbatch in self._activations[chunk] or self._starts[chunk]:
                    if chunk == 0 and not self._may_enter(task.microbatch):
                        continue
                    ready.forwards.append(task)
            if len(ready.forwards) > 1:
                # As many microbatches as stages go through one chunk, then through the next.
                depth = self.place.depth
                ready.forwards.sort(key=lambda task: (task.microbatch // depth, task.chunk))
        if not self.forward_only:
            for chunk, task in enumerate(self._next_backwards):
                if self._hold_backwards and task.microbatch >= self._must_end:
                    continue
                if task.microbatch in self._gradients[chunk] or (
                    self._ends[chunk] and task.microbatch < self._next_forwards[chunk].microbatch
                ):
                    ready.backwards.append(task)
        if not (ready.forwards or ready.backwards or ready.weight):
            return None
        return self._hint.choose(ready)

    def completed(self, task: Task) -> None:
        """Note that `task`, the last one chosen, has run."""
        kind, microbatch, chunk = task
        ready = self._ready
        if kind is FORWARD:
            assert task == self._next_forwards[chunk]
            self._next_forwards[chunk] = Task(FORWARD, microbatch + 1, chunk)
            self._activations[chunk].discard(microbatch)
            ready.ahead += 1
            # A forward-only batch uses up the pipeline's last output at once.
            self.live += not (self.forward_only and self._ends[chunk])
            self.peak_live = max(self.peak_live, self.live)
        elif kind is BACKWARD:
            assert task == self._next_backwards[chunk]
            self._next_backwards[chunk] = Task(BACKWARD, microbatch + 1, chunk)
            self._gradients[chunk].discard(microbatch)
            ready.ahead -= 1
            if self._splits_weight:
                self._deferred.append(Task(WEIGHT, microbatch, chunk))
            else:
                self.live -= 1
        elif kind is WEIGHT:
            assert task == self._deferred[0]
            self._pieces_left -= 1
            if self._pieces_left:  # the same task again, until its last piece
                return
            self._pieces_left = self._weight_pieces
            self._deferred.popleft()
            self.live -= 1
            return
        else:
            self._updates -= 1
            return
        self._left -= 1
        ready.last = kind

    def released(self, count: int) -> None:
        """Note that `count` more outputs of a forward-only batch left this stage."""
        self.live -= count

    def awaited(self) -> list[Task]:
        """The tasks whose input a stage with nothing ready is waiting for."""
        tasks = []
        for chunk, task in enumerate(self._next_forwards):
            left = task.microbatch < self._end and self.live < self._most_live
            if left and not self._starts[chunk] and (chunk or self._may_enter(task.microbatch)):
                tasks.append(task)
        for chunk, task in enumerate(self._next_backwards):
            forwards = self._next_forwards[chunk].microbatch
            held = self._hold_backwards and task.microbatch >= self._must_end
            if task.microbatch < forwards and not (self._ends[chunk] or self.forward_only or held):
                tasks.append(task)
        return tasks

    def _update_is_near(self) -> bool:
        """Whether the next batch waits for the update, or will soon: half of it has entered.

        To run weight gradients earlier than that would only hold other tasks up.
        """
        entered = self._next_forwards[0].microbatch
        return self._hold_backwards or 2 * entered >= self._must_end + self._end

    def _weight_is_due(self) -> bool:
        return any(task.microbatch < self._must_end for task in self._deferred)

    def _backwards_ended(self) -> bool:
        return all(task.microbatch >= self._must_end for task in self._next_backwards)

    def _may_enter(self, microbatch: int) -> bool:
        """Whether the limit lets this microbatch, the next one, enter the stage."""
        if microbatch >= self._end:
            return False
        if not self.forward_only:
            return microbatch - self._next_backwards[0].microbatch < self._most_entered
        # Outputs that go round to another chunk must fit into the buffers of one link, or a ring
        # of full buffers could block itself.
        last = self._next_forwards[-1].microbatch
        return self.place.chunks == 1 or microbatch - last < self._most_live
