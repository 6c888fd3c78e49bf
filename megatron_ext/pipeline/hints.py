"""Hints: which of the ready tasks a stage runs next.

A hint ranks what is ready; it does not fix an order beforehand (RRFP, section 5). Each is one
small class. To try your own, pass ``--rrfp-hint module:Name`` with a subclass of `Hint`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_ext.pipeline.task import Kind, Task

FORWARD, BACKWARD, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


@dataclass(frozen=True)
class Place:
    """Where a stage is, and the size of the batch it runs."""

    stage: int
    depth: int
    """Number of stages of the pipeline."""
    microbatches: int
    live_limit: int
    """Most microbatches the stage may hold."""
    chunks: int = 1
    """Model chunks (virtual stages) per stage."""


@dataclass(slots=True)
class ReadySet:
    """What a stage could run now, and what a hint may base its choice on."""

    forwards: list[Task] = field(default_factory=list)
    """Forwards whose input is here and that the live limit lets start, best one first."""
    backwards: list[Task] = field(default_factory=list)
    """Backwards whose gradient is here, by chunk."""
    weight: Task | None = None
    """The oldest weight gradient left for later."""
    last: Kind | None = None
    """Kind of the forward or backward that ran last in this batch."""
    ahead: int = 0
    """Forwards done less backwards done, over all chunks."""
    full: bool = False
    """Whether the stage holds all it may, so that no forward can start."""

    @property
    def count(self) -> int:
        """How many tasks there are to choose from."""
        return len(self.forwards) + len(self.backwards) + (self.weight is not None)

    @property
    def forward(self) -> Task | None:
        """The one whose microbatch's group entered first, and of these the smallest chunk's."""
        return self.forwards[0] if self.forwards else None

    @property
    def backward(self) -> Task | None:
        """The largest chunk's, so that chunks finish, and reduce, early (RRFP, section 5)."""
        return self.backwards[-1] if self.backwards else None


class Hint:
    """Base of all hints; one is made per stage and batch."""

    splits_weight = False
    """Whether backwards leave their weight gradients for tasks of their own."""
    weight_pieces = 1
    """Tasks into which the weight gradient of a microbatch is cut, layer after layer. The
    microbatch is held until the last one is done."""
    live_limit = "2p"
    """Live limit where the user gives none."""
    tapers = False
    """Whether without chunks the limit falls by one from stage to stage; see `tapered`."""
    fixed_order = False
    """Whether the order is fixed and bounds memory by itself."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def choose(self, ready: ReadySet) -> Task | None:
        """One task of `ready`; None only to wait although something is ready."""
        raise NotImplementedError


class BackwardForward(Hint):
    """BF: alternate one backward and one forward while both are ready, else run what is ready.

    RRFP, section 5 and Algorithm 1: a round tries a backward and then a forward, so a forward
    that is ready waits for at most one backward.
    """

    tapers = True

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        if ready.backwards and (ready.last != BACKWARD or not ready.forwards):
            return ready.backward
        return ready.forward


class BackwardForwardWeight(BackwardForward):
    """BFW: as BF, and weight gradients when neither a backward nor a forward can run.

    RRFP, section 7.1; there weight gradients may pile up to the whole batch. Here those left for
    later count as live, so the limit bounds them, and a forward that it blocks lets one run.
    """

    splits_weight = True
    live_limit = "p"
    tapers = False

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        return super().choose(ready) or ready.weight


class BackwardForwardWeightByDepth(Hint):
    """BFW with 1F1B's depth: forwards first while the stage is less far ahead than 1F1B's.

    While both are ready, a stage takes the forward until it is as far ahead of its backwards as
    1F1B would be there, then the backward: early stages fill the pipeline, late ones drain it.
    """

    splits_weight = True
    live_limit = "p"

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        place = self.place
        depth = place.chunks * place.depth - place.stage
        if ready.forwards and (not ready.backwards or ready.ahead < depth):
            return ready.forward
        return ready.backward or ready.weight


class BackwardForwardWeightByRoom(BackwardForwardWeightByDepth):
    """BFW by depth, and a weight gradient before a backward where that makes room for a forward.

    A stage that is full can start no forward. While it is less far ahead than 1F1B's, that forward
    would go before a backward, so the weight gradient that makes room for it does too.
    """

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        place = self.place
        if ready.full and ready.weight and ready.ahead < place.chunks * place.depth - place.stage:
            return ready.weight
        return super().choose(ready)


class BackwardForwardWeightInPieces(BackwardForwardWeightByRoom):
    """BFW by room, with the weight gradient of a microbatch in four tasks.

    Whatever becomes ready while a weight gradient runs then waits for a quarter of it at most. In
    simulation at 1F1B's own memory that is worth as much again as splitting it off.
    """

    weight_pieces = 4


class ForwardBackward(Hint):
    """FB: alternate like BF, a round trying the forward first."""

    tapers = True

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        if ready.forwards and (ready.last != FORWARD or not ready.backwards):
            return ready.forward
        return ready.backward


class BackwardPriority(Hint):
    """Backwards as long as any is ready."""

    tapers = True

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        return ready.backward or ready.forward


class ForwardPriority(Hint):
    """Forwards as long as any is ready."""

    tapers = True

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        return ready.forward or ready.backward


class OneForwardOneBackward(Hint):
    """1F1B: Megatron's fixed order, plain or interleaved, waiting for each task in turn.

    The baseline that differs from the readiness-driven hints in nothing but the order. Without
    chunks the first stage's warm-up is as deep as the live limit allows, and that of the others
    in proportion: ``p`` gives Megatron's own. With chunks the warm-up is Megatron's.
    """

    live_limit = "p"
    fixed_order = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if place.chunks > 1 and place.microbatches % place.depth:
            raise ValueError(
                f"the interleaved 1f1b order needs a multiple of {place.depth} microbatches "
                f"(the pipeline's depth), not {place.microbatches}"
            )
        self._order = one_forward_one_backward_order(place)
        self._next: Task | None = next(self._order)

    def choose(self, ready: ReadySet) -> Task | None:  # noqa: D102
        task = self._next
        if task in ready.forwards or task in ready.backwards:
            self._next = next(self._order, None)
            return task
        return None


def one_forward_one_backward_order(place: Place) -> Iterator[Task]:
    """1F1B's tasks of one stage in order; interleaved where there are several chunks."""
    total = place.microbatches * place.chunks
    if place.chunks == 1:
        behind = place.depth - 1 - place.stage
        warm_up = -(-behind * (place.live_limit - 1) // max(place.depth - 1, 1))
    else:
        warm_up = 2 * (place.depth - place.stage - 1) + (place.chunks - 1) * place.depth
    warm_up = min(warm_up, total)

    def tasks(kind: Kind) -> Iterator[Task]:
        """Groups of as many microbatches as stages, each through one chunk after the other."""
        chunks = range(place.chunks)
        for first in range(0, place.microbatches, place.depth):
            for chunk in chunks if kind is FORWARD else reversed(chunks):
                for microbatch in range(first, min(first + place.depth, place.microbatches)):
                    yield Task(kind, microbatch, chunk)

    forwards, backwards = tasks(FORWARD), tasks(BACKWARD)
    for _ in range(warm_up):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


HINTS: dict[str, type[Hint]] = {
    "bf": BackwardForward,
    "bfw": BackwardForwardWeight,
    "bfw-depth": BackwardForwardWeightByDepth,
    "bfw-room": BackwardForwardWeightByRoom,
    "bfw-pieces": BackwardForwardWeightInPieces,
    "fb": ForwardBackward,
    "b-priority": BackwardPriority,
    "f-priority": ForwardPriority,
    "1f1b": OneForwardOneBackward,
}


def find_hint(name: str) -> type[Hint]:
    """The hint of that name, or the subclass of `Hint` that ``module:Name`` names.

    Raises:
        ValueError: There is none.
    """
    if name in HINTS:
        return HINTS[name]
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise ValueError(
            f"no hint {name!r}; there are {', '.join(HINTS)}, and yours as module:Name"
        )
    try:
        hint = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error
    if not (isinstance(hint, type) and issubclass(hint, Hint)):
        raise ValueError(f"{name!r} is no subclass of megatron_ext.pipeline.hints.Hint")
    return hint
