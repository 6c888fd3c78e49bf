from __future__ import annotations

import pytest

from megatron_ext.pipeline.hints import (
    HINTS,
    BackwardForward,
    Hint,
    Place,
    ReadySet,
    find_hint,
    one_forward_one_backward_order,
)
from megatron_ext.pipeline.task import Kind, Task

FORWARD, BACKWARD, WEIGHT, _ = (Task(kind, 3) for kind in Kind)
PLACE = Place(stage=1, depth=4, microbatches=8, live_limit=4)


def order_of(name: str, rounds: int = 4, ahead: int = 0) -> str:
    """Initials of what the hint runs while a task of every kind is ready."""
    hint = HINTS[name](PLACE)
    ready = ReadySet([FORWARD], [BACKWARD], WEIGHT, None, ahead)
    initials = ""
    for _ in range(rounds):
        task = hint.choose(ready)
        assert task is not None
        initials += task.kind.name[0]
        ready.last = task.kind
        ready.ahead += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: 0}[task.kind]
    return initials


def test_preferences() -> None:
    assert order_of("bf") == order_of("bfw") == "BFBF"
    assert order_of("fb") == "FBFB"
    assert order_of("b-priority") == "BBBB"
    assert order_of("f-priority") == "FFFF"
    assert order_of("bfw-room", 7, ahead=1) == order_of("bfw-depth", 7, ahead=1)
    # Stage 1 of 4 is 3 ahead under 1F1B: forwards until there, then in turn.
    assert order_of("bfw-depth", 7, ahead=1) == "FFBFBFB"


def test_room_is_made_only_for_a_forward_that_is_due() -> None:
    hint = HINTS["bfw-room"](PLACE)
    due, early = (ReadySet([], [BACKWARD], WEIGHT, None, ahead, full=True) for ahead in (2, 3))
    assert hint.choose(due) == WEIGHT
    assert hint.choose(early) == BACKWARD
    assert hint.choose(ReadySet([], [BACKWARD], None, None, 2, full=True)) == BACKWARD
    assert hint.choose(ReadySet([], [BACKWARD], WEIGHT, None, 2)) == BACKWARD


@pytest.mark.parametrize("name", [name for name, hint in HINTS.items() if not hint.fixed_order])
def test_what_alone_is_ready_runs(name: str) -> None:
    for last in (None, Kind.FORWARD, Kind.BACKWARD):
        for ahead in (0, 9):
            hint = HINTS[name](PLACE)
            assert hint.choose(ReadySet([FORWARD], [], None, last, ahead)) == FORWARD
            assert hint.choose(ReadySet([], [BACKWARD], None, last, ahead)) == BACKWARD
            if hint.splits_weight:
                assert hint.choose(ReadySet([], [], WEIGHT, last, ahead)) == WEIGHT


def test_interleaved_order_is_megatrons() -> None:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    place = Place(stage=1, depth=2, microbatches=6, live_limit=1, chunks=2)
    order = list(one_forward_one_backward_order(place))
    table = get_schedule_table(6, 2, 2)
    forwards = [(t.microbatch, t.chunk) for t in order if t.kind is Kind.FORWARD]
    backwards = [(t.microbatch, 1 - t.chunk) for t in order if t.kind is Kind.BACKWARD]
    assert forwards == backwards == [tuple(entry) for entry in table]
    # Megatron's warm-up: twice the stages behind, and every chunk but one for the whole depth.
    assert [t.kind for t in order[:4]] == [Kind.FORWARD] * 3 + [Kind.BACKWARD]


class Mine(BackwardForward):
    """A user's hint."""


def test_a_hint_is_found_by_name_or_import_path() -> None:
    assert find_hint("bfw") is HINTS["bfw"]
    assert find_hint(f"{__name__}:Mine") is Mine
    for name, reason in [
        ("bwf", "no hint 'bwf'; there are bf, bfw"),
        ("no.such:Name", "cannot be imported"),
        (f"{__name__}:NoSuch", "cannot be imported"),
        (f"{__name__}:PLACE", "is no subclass"),
    ]:
        with pytest.raises(ValueError, match=reason):
            find_hint(name)
    assert all(issubclass(hint, Hint) for hint in HINTS.values())
