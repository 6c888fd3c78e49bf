"""The page of a real training, from its first flag to the last table."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.report.run import read_run
from tests.pipeline.test_trace import arrows, load
from tests.training import RRFP, train_well

FLAGS = (
    "--pipeline-model-parallel-size 2 --train-iters 5 --pipedream-2bw --rrfp-hint bfw "
    "--rrfp-live-limit 2p --tensorboard-dir {folder}/tensorboard --rrfp-trace {folder}/trace:2-4"
)


@pytest.mark.multiprocess
def test_a_run_with_two_weight_versions(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_well(corpus, 2, [*RRFP, *shlex.split(FLAGS.format(folder=tmp_path))])
    target = tmp_path / "report.html"
    assert cli.main(["report", str(tmp_path), "-o", str(target)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "No collapse curve" in line
    run = read_run(tmp_path, column=None)
    assert run.iterations == [2, 3, 4]
    assert run.losses is not None
    assert run.losses.steps.tolist() == [1, 2, 3, 4, 5]
    assert run.what_if is not None
    assert run.what_if.ran == "bfw 2p 2BW"
    assert run.what_if.iterations == 2  # the first one had begun before the trace
    text = target.read_text()
    lags = re.findall(r'<th scope="row">(\d)</th><td>1</td><td>[\d.]+ m?s</td>', text)
    assert lags == ["2", "3", "4"]
    for words in ("--pipedream-2bw", "peak resident memory", "2BW error feedback"):
        assert words in text
    # A message may be used in a later batch than it arrived in; its arrow ends all the same.
    events = [
        event for rank in (0, 1) for event in load(tmp_path / f"trace/rank-0000{rank}.json")[1]
    ]
    ends = ["".join(point["ph"] for point in points) for points in arrows(events).values()]
    assert ends.count("stf") >= len(ends) - 8
