"""Plain progress lines: seldom, complete, and silent for short work."""

from __future__ import annotations

import io

from megatron_ext.progress import ProgressLine


def test_short_work_writes_nothing_to_a_file() -> None:
    stream = io.StringIO()
    with ProgressLine("corpus", 3, "files", stream=stream) as line:
        for done in range(4):
            line.update(done)
    assert stream.getvalue() == ""


def test_plain_lines_name_the_work_and_how_far_it_is() -> None:
    stream = io.StringIO()
    with ProgressLine("training", None, "iterations", stream=stream, interval=0.0) as line:
        line.update(0, "starting")
        line.update(7, "loss 3.21", total=40)
    first, second = stream.getvalue().splitlines()
    assert first.startswith("training: 0 iterations, starting, ")
    assert second.startswith("training: 7/40 iterations, loss 3.21, ")
