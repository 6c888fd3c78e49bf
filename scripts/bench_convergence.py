r"""What a step of delay costs in validation loss, and what repairs it, on real text.

Small byte-level GPTs are trained on the source of Python's standard library, through Megatron's own
training loop and this package's two weight versions: synchronously, one step late (2bw), and one
step late with error feedback (2bw+ef). Every mode sees the same tokens in the same order. The
learning rate of each optimizer is the best one of its *synchronous* runs.

    python scripts/bench_convergence.py --json docs/data/convergence.json

Every training is kept in a cache folder, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext.corpus import build_corpus

REPOSITORY = Path(__file__).parent.parent
LEARNING_RATES = {"adam": (3e-3, 6e-3, 1.2e-2), "muon": (2e-3, 4e-3, 8e-3, 1.6e-2)}
STARTS = ("0.05", "0.10", "0.25")
ENDS = (("0", "0.90"), ("0.05", "0.95"), ("0.10", "0.75"))
"""Synchronous start and end."""
COEFFICIENTS = (0.5, 1.5, 2.0)


@dataclass(frozen=True)
class Training:
    """One run."""

    optimizer: str
    learning_rate: float
    seed: int
    steps: int
    delayed: bool = False
    error_feedback: float = 0.0
    start: str = "0"
    end: str | None = None
    script: str = "pretrain_gpt.py"

    @property
    def mode(self) -> str:
        """As the results name it."""
        if not self.delayed:
            return "sync"
        return "2bw+ef" if self.error_feedback else "2bw"

    def flags(self, args: argparse.Namespace, data: Path) -> list[str]:
        """Megatron's and ours."""
        flags = (
            f"--num-layers {args.layers} --hidden-size {args.hidden_size} --num-attention-heads 4"
            f" --seq-length {args.sequence_length}"
            f" --max-position-embeddings {args.sequence_length}"
            f" --micro-batch-size {args.batch_size} --global-batch-size {args.batch_size}"
            f" --train-iters {self.steps} --seed {self.seed}"
            f" --optimizer {self.optimizer} --lr {self.learning_rate} --min-lr 0"
            " --lr-decay-style cosine --lr-warmup-fraction 0.1 --clip-grad 1.0"
            " --weight-decay 0.1 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0"
            " --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1"
            f" --data-path {data} --data-cache-path {data.parent / 'cache'} --split 95,5,0"
            f" --eval-interval {self.steps} --eval-iters {args.evaluation_steps}"
            f" --log-interval {self.steps}"
        ).split()
        if self.delayed:
            flags += ["--pipeline-schedule", "rrfp", "--rrfp-hint", "bf", "--pipedream-2bw"]
            flags += ["--pipedream-2bw-error-feedback", str(self.error_feedback)]
            flags += ["--pipedream-2bw-start-iteration", self.start]
            if self.end is not None:
                flags += ["--pipedream-2bw-end-iteration", self.end]
        return flags


def validation_loss(training: Training, args: argparse.Namespace, data: Path) -> float:
    """Train, or find the result in the cache.

    Raises:
        RuntimeError: The run failed; says where its output is.
    """
    flags = training.flags(args, data)
    scripts = [] if training.script == "pretrain_gpt.py" else [training.script]
    name = hashlib.sha256(" ".join(scripts + flags).encode()).hexdigest()[:16]
    log = args.cache / f"{training.optimizer}-{training.mode}-{name}.log"
    found = _read(log)
    if found is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        script = REPOSITORY / "scripts" / training.script
        command = [sys.executable, "-m", "megatron_ext", "--cpu", str(script), *flags]
        with log.open("w") as output:
            subprocess.run(command, stdout=output, stderr=output, env=environment, check=False)
        found = _read(log)
    if found is None:
        raise RuntimeError(f"{training} gave no validation loss; its output is in {log}")
    return found


def _read(log: Path) -> float | None:
    text = log.read_text() if log.exists() else ""
    found = re.findall(r"validation loss at iteration \d+ on validation set .*?: ([\d.E+-]+)", text)
    return float(found[-1]) if found else None


class Bench:
    """Runs trainings, several at a time, and remembers their losses."""

    def __init__(self, args: argparse.Namespace, data: Path, progress: Progress) -> None:
        self._args, self._data, self._progress = args, data, progress
        self.losses: dict[Training, float] = {}

    def run(self, what: str, trainings: list[Training]) -> None:
        """Run those that have not run."""
        missing = [t for t in dict.fromkeys(trainings) if t not in self.losses]
        bar = self._progress.add_task(what, total=len(missing))
        with concurrent.futures.ThreadPoolExecutor(self._args.jobs) as pool:
            under_way = {
                pool.submit(validation_loss, t, self._args, self._data): t for t in missing
            }
            for done in concurrent.futures.as_completed(under_way):
                self.losses[under_way[done]] = done.result()
                self._progress.advance(bar)


def modes(sync: Training) -> list[Training]:
    """A synchronous run and the same one step late, without and with error feedback."""
    delayed = replace(sync, delayed=True)
    return [sync, delayed, replace(delayed, error_feedback=1.0)]


def measure(args: argparse.Namespace, data: Path, progress: Progress) -> dict[str, Any]:
    """Everything that the tables show."""
    bench = Bench(args, data, progress)
    rates = {name: LEARNING_RATES[name] for name in args.optimizers}
    grid = [Training(name, rate, 1234, args.steps) for name in rates for rate in rates[name]]
    bench.run("synchronous, every learning rate", grid)
    best = {
        name: min((t for t in grid if t.optimizer == name), key=bench.losses.__getitem__)
        for name in rates
    }
    seeds = [1234 + number for number in range(args.seeds)]
    main = {name: [modes(replace(best[name], seed=seed)) for seed in seeds] for name in rates}
    bench.run("seeds", [t for name in rates for group in main[name] for t in group])
    results = []
    for name in rates:
        for number, mode in enumerate(("sync", "2bw", "2bw+ef")):
            losses = [bench.losses[group[number]] for group in main[name]]
            results.append(
                {
                    "optimizer": name,
                    "mode": mode,
                    "learning_rate": best[name].learning_rate,
                    "val_loss": statistics.mean(losses),
                    "std": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                    "seeds": len(losses),
                }
            )
    variants: dict[str, list[Training]] = {
        "learning rate": [t for sync in grid for t in modes(sync)],
        "steps": [
            t
            for name in rates
            for factor in args.step_factors
            for t in modes(replace(best[name], steps=round(args.steps * factor)))
        ],
        "synchronous start": [
            replace(best[name], delayed=True, error_feedback=coefficient, start=start)
            for name in rates
            for start in STARTS
            for coefficient in (0.0, 1.0, 2.0)
        ],
        "synchronous start and end": [
            replace(best[name], delayed=True, error_feedback=coefficient, start=start, end=end)
            for name in rates
            for start, end in ENDS
            for coefficient in (1.0, 2.0)
        ],
        "prediction from the momentum": [
            replace(
                best[name],
                delayed=True,
                error_feedback=coefficient,
                script="pretrain_with_momentum_prediction.py",
            )
            for name in rates
            if name == "muon"
            for coefficient in (0.7, 1.0, 1.5)
        ],
        "coefficient": [
            replace(best[name], delayed=True, error_feedback=coefficient)
            for name in rates
            for coefficient in COEFFICIENTS
        ],
    }
    series = {}
    for what, trainings in variants.items():
        bench.run(what, trainings)
        series[what] = [
            {**asdict(t), "mode": t.mode, "val_loss": bench.losses[t]} for t in trainings
        ]
    return {"results": results, "series": series}


def show(found: dict[str, Any], console: Console) -> None:
    """Print the losses, and what of the gap error feedback closes."""
    table = Table(title="validation loss")
    for column in ("optimizer", "mode", "loss", "gap to sync", "closed"):
        table.add_column(column)
    by_key = {(r["optimizer"], r["mode"]): r for r in found["results"]}
    for (name, mode), record in by_key.items():
        sync, plain = (by_key[name, m]["val_loss"] for m in ("sync", "2bw"))
        gap = record["val_loss"] - sync
        closed = f"{1 - gap / (plain - sync):.0%}" if mode == "2bw+ef" else ""
        table.add_row(
            name, mode, f"{record['val_loss']:.4f} +- {record['std']:.4f}", f"{gap:+.4f}", closed
        )
    console.print(table)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--optimizers", nargs="+", default=["adam", "muon"], choices=LEARNING_RATES)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-factors", type=float, nargs="*", default=[0.5, 2.0])
    parser.add_argument("--evaluation-steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    parser.add_argument(
        "--cache", type=Path, default=Path("out/convergence"), help="folder of the trainings' logs"
    )
    parser.add_argument("--json", type=Path, help="write the losses to this file")
    return parser.parse_args(argv)


def main() -> int:
    """Measure, print, write."""
    args = parse_arguments()
    args.cache = args.cache.resolve()
    args.cache.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    data = args.cache / "standard-library"
    if not data.with_suffix(".bin").exists():
        build_corpus(
            [Path(sysconfig.get_path("stdlib"))],
            data,
            suffixes=[".py"],
            exclude=("site-packages", "test", "tests", "__pycache__"),
        )
    with Progress(console=console) as progress:
        found = measure(args, data, progress)
    found["settings"] = {
        name: getattr(args, name)
        for name in ("layers", "hidden_size", "sequence_length", "batch_size", "steps", "seeds")
    }
    show(found, console)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
