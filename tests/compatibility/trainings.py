"""Trains with the Megatron that is first on the path, and writes what every rank computed.

``python -m tests.compatibility.trainings CORPUS RECORDS FLAGS...``: every FLAGS is one training in
two stages, given as one argument. Those that begin with "alone" start by the script alone; others
by ``python -m megatron_ext``. In those that go on with "faulty" the loss becomes NaN. Ranks are
forked from a server, so Megatron is imported once for all of them.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.collapse.test_training import fault_from
from tests.training import REPOSITORY, train

TIME_LIMIT_S = 600


def run_in(
    megatron: Path, corpus: Path, folder: Path, *trainings: str, time_limit_s: int = TIME_LIMIT_S
) -> list[list[dict[str, Any]]]:
    """Run trainings with a given Megatron.

    Args:
        megatron: A folder with the folder ``megatron``.
        corpus: Prefix of the data.
        folder: For the records.
        trainings: Flags of each.
        time_limit_s: For all.

    Returns:
        Of every training the record of every rank, with how it ended.
    """
    records = folder / f"records of {megatron.name}.json"
    environment = {**os.environ, "PYTHONPATH": f"{megatron}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(corpus), str(records), *trainings],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=time_limit_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read: list[list[dict[str, Any]]] = json.loads(records.read_text())
    return read


def observe(faulty: bool, record: dict[str, Any]) -> None:
    """Record which Megatron is used, and all events of its callbacks if it has them."""
    import megatron.core

    if faulty:
        fault_from(2, float("nan"))(record)

    record["megatron"] = megatron.core.__file__
    record["events"] = []
    try:
        from megatron.training import callbacks
    except ImportError:
        return
    callbacks.add(_EventLog(record["events"]))


class _EventLog:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def __getattr__(self, name: str) -> Any:
        def note(context: Any) -> None:
            self._events.append(name)

        if name.startswith("on_"):
            return note
        raise AttributeError(name)


def start_alone(argv: list[str]) -> None:
    """Run a script as ``python SCRIPT`` does, with what a CPU and a wheel lack, and no more."""
    from megatron_ext import hooks
    from megatron_ext.hook import install

    install((*hooks.WHEEL_HOOKS, *hooks.CPU_HOOKS))
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    """Run the trainings of the command line."""
    corpus, file, *trainings = sys.argv[1:]
    results = []
    # Another Megatron may be at work on the same data.
    own_cache = ["--data-cache-path", str(Path(file).with_suffix(".cache"))]
    for training in trainings:
        words = shlex.split(training)
        alone, faulty = "alone" in words, "faulty" in words
        flags = [word for word in words if word not in ("alone", "faulty")]
        ranks, records = train(
            Path(corpus),
            2,
            ["--pipeline-model-parallel-size", "2", *own_cache, *flags],
            observe=functools.partial(observe, faulty),
            start=start_alone if alone else None,
            timeout_s=TIME_LIMIT_S,
        )
        for rank, record in zip(ranks, records, strict=True):
            record["exit_code"] = rank.exit_code
            record["output"] = rank.output
        results.append(records)
    Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
