"""However a training is told to end early, it leaves a checkpoint from which it goes on exactly."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.training import RRFP, train_well

pytestmark = pytest.mark.multiprocess

MODES = {
    "rrfp": RRFP,
    "2bw": [*RRFP, "--pipedream-2bw", "--optimizer", "muon"],
}
SIGNAL = shlex.split("--exit-signal-handler --exit-signal SIGUSR1")


def send_signal(record: dict[str, Any]) -> None:
    """The second rank gets the signal while the second iteration of the process runs."""
    from megatron.training import training

    train_step = training.train_step
    steps = 0

    def signalled(*args: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        return train_step(*args, **named)

    training.train_step = signalled


@pytest.mark.parametrize("mode", MODES)
def test_each_way_to_end_leaves_a_clean_checkpoint(corpus: Path, tmp_path: Path, mode: str) -> None:
    """One training in four pieces, each ended in another way, is the training in one go."""
    flags = [*shlex.split("--pipeline-model-parallel-size 2 --train-iters 7"), *MODES[mode]]
    whole = train_well(corpus, 2, flags)
    folder = str(tmp_path)
    keep = [*flags, "--save", folder, "--load", folder, "--save-interval", "100"]
    pieces = [
        train_well(corpus, 2, [*keep, "--exit-interval", "2"]),
        train_well(corpus, 2, [*keep, *SIGNAL], observe=send_signal),
        # Over at once: after one iteration.
        train_well(corpus, 2, [*keep, "--exit-duration-in-mins", "-1"]),
        train_well(corpus, 2, keep),
    ]
    assert [len(piece[0]["steps"]) for piece in pieces] == [2, 2, 1, 2]
    for number, record in enumerate(whole):
        assert [step for piece in pieces for step in piece[number]["steps"]] == record["steps"]
        assert pieces[-1][number]["weights"] == record["weights"]
