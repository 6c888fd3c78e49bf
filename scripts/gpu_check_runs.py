"""Starts the trainings of `gpu_check.py`, each once, with a time limit, and keeps their records."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_check_rank import rank_main

RRFP = "--pipeline-schedule rrfp --rrfp-transport gloo"


class RunError(Exception):
    """A training did not end well; the message says why, in one line."""


@dataclass(frozen=True)
class Size:
    """How large the trained model and its batches are."""

    model: str
    layers: int
    sequence_length: int
    micro_batch: int
    microbatches: int
    iterations: int
    """Of most runs."""
    long_iterations: int
    """Of those whose loss is compared."""

    @property
    def tokens(self) -> int:
        """Per iteration."""
        return self.sequence_length * self.micro_batch * self.microbatches


GPU = Size("--hidden-size 576 --num-attention-heads 9", 8, 512, 4, 8, 8, 100)
"""32M parameters, with an alphabet of bytes."""
CPU = Size("--hidden-size 32 --num-attention-heads 4", 4, 32, 1, 8, 3, 6)


@dataclass(frozen=True)
class Training:
    """One run."""

    name: str
    title: str
    ranks: int
    flags: str
    long: bool = False
    traced: bool = False


@dataclass
class Record:
    """What a run computed."""

    training: Training
    ranks: list[dict[str, Any]]
    tokens: int
    seconds: float
    trace: Path

    @property
    def losses(self) -> list[float]:
        """Of every iteration, on the last rank."""
        return [step["loss"] for step in self.ranks[-1]["steps"]]

    @property
    def iteration_ms(self) -> float:
        """Median time of an iteration, the first two left out."""
        steps = self.ranks[-1]["steps"]
        return statistics.median(step["seconds"] for step in steps[2:] or steps) * 1e3

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.iteration_ms * 1e3

    @property
    def memory_gib(self) -> float:
        """Most memory that any rank allocated on the GPU."""
        return max(float(rank["memory_gib"]) for rank in self.ranks)

    def median(self, name: str) -> float | None:
        """Median over all ranks and iterations of a figure of the executor."""
        values = [step.get(name) for rank in self.ranks for step in rank["steps"]]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None


@dataclass
class Runs:
    """All trainings so far.

    Args:
        folder: Where logs, records and traces go.
        data: Prefix of the corpus.
        cpu: Whether to train on the CPU, at tiny size.
        ends_at: `time.monotonic` after which nothing is started.
    """

    folder: Path
    data: Path
    cpu: bool
    ends_at: float
    done: dict[str, Record | RunError] = field(default_factory=dict)

    @property
    def size(self) -> Size:
        """Of all models here."""
        return CPU if self.cpu else GPU

    def get(self, training: Training) -> Record:
        """The record of a training, which is run if it has not been.

        Raises:
            RunError: A rank failed, or the time is up.
        """
        if training.name not in self.done:
            try:
                self.done[training.name] = self._run(training)
            except RunError as error:
                self.done[training.name] = error
        found = self.done[training.name]
        if isinstance(found, RunError):
            raise found
        return found

    def _run(self, training: Training) -> Record:
        limit = min(self.ends_at - time.monotonic(), 240.0 if self.cpu else 120.0)
        if limit < 10:
            raise RunError(f"{training.title}: not started, the time is up (--limit-s)")
        folder = self.folder / training.name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank-*"):
            old.unlink()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = time.monotonic()
        argv = self._argv(training, folder)
        # On the CPU ranks are forked from a server that has imported Megatron, which saves seconds.
        # With a GPU nothing may touch CUDA before the fork, and that cannot be known.
        context: Any = multiprocessing.get_context("forkserver" if self.cpu else "spawn")
        if self.cpu:
            context.set_forkserver_preload(["gpu_check_preload"])
        processes = [
            context.Process(
                target=rank_main,
                args=(rank, training.ranks, port, argv, str(folder), self.cpu),
            )
            for rank in range(training.ranks)
        ]
        for process in processes:
            process.start()
        try:
            while any(process.is_alive() for process in processes):
                if any(process.exitcode for process in processes):
                    time.sleep(2)  # the others say why they end, too
                    break
                if time.monotonic() - started > limit:
                    raise RunError(f"{training.title}: not done in {limit:.0f} s; see {folder}")
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.is_alive() and process.pid:
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
        records = [folder / f"rank-{rank}.json" for rank in range(training.ranks)]
        if not all(record.exists() for record in records):
            raise RunError(f"{training.title}: {_reason(folder)}; see {folder}")
        ranks = [json.loads(record.read_text()) for record in records]
        record = Record(
            training, ranks, self.size.tokens, time.monotonic() - started, folder / "trace"
        )
        if not all(math.isfinite(loss) for loss in record.losses):
            raise RunError(f"{training.title}: the loss is {record.losses[-1]}; see {folder}")
        return record

    def _argv(self, training: Training, folder: Path) -> list[str]:
        size = self.size
        iterations = size.long_iterations if training.long else size.iterations
        length = size.sequence_length
        flags = f"""
            {size.model} --num-layers {size.layers} --seq-length {length}
            --max-position-embeddings {length} --attention-dropout 0 --hidden-dropout 0
            --micro-batch-size {size.micro_batch}
            --global-batch-size {size.micro_batch * size.microbatches} --train-iters {iterations}
            --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
            --bf16 --seed 1234 --split 90,5,5 --eval-interval 1000 --eval-iters 0 --log-interval 1
            --tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0
            --data-path {self.data} --data-cache-path {self.folder / "cache"}
            --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
            --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
            --no-rope-fusion --deterministic-mode --distributed-timeout-minutes 2
        """.split()
        if training.ranks > 1 or self.cpu:
            flags += ["--distributed-backend", "gloo"]
        if training.traced:
            flags += ["--rrfp-trace", str(folder / "trace")]
        return [*flags, *training.flags.split()]


def _reason(folder: Path) -> str:
    """The line that says why, of the rank that knew first."""
    logs = sorted(folder.glob("rank-*.log"), key=lambda log: log.stat().st_mtime)
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    for mark in ("megatron_ext: error:", "Error: ", "error: "):
        for line in lines:
            if mark in line:
                return line.strip()[:400]
    return "a rank ended without a word" if not lines else lines[-1].strip()[:400]
