from __future__ import annotations

from megatron_ext.pipeline.hints import ReadySet, backward_forward
from megatron_ext.pipeline.task import Direction, Task

FORWARD, BACKWARD = Task(Direction.FORWARD, 3), Task(Direction.BACKWARD, 1)


def test_backward_forward_alternates_while_both_are_ready() -> None:
    last = None
    ran = []
    for _ in range(4):
        task = backward_forward(ReadySet(FORWARD, BACKWARD, last))
        assert task is not None
        ran.append(task)
        last = task.direction
    assert ran == [BACKWARD, FORWARD, BACKWARD, FORWARD]


def test_backward_forward_runs_what_alone_is_ready() -> None:
    for last in (None, *Direction):
        assert backward_forward(ReadySet(FORWARD, None, last)) == FORWARD
        assert backward_forward(ReadySet(None, BACKWARD, last)) == BACKWARD
