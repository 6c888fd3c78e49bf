"""Train a family of small byte-level GPTs on CPU through Megatron: do their curves collapse?

Four sizes share tokens per parameter, tau and a linear decay to zero; Megatron's muP flags scale
initialisation and learning rate with the width. The text is the standard library's source. A run
that was interrupted goes on from its last checkpoint. With --fault the middle size is trained once
more from its checkpoint at 60% with a data-parallel rank whose optimizer is frozen.

Writes into --out: a log per run, family.csv with all curves, family.json with what was found,
curve files and family.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.collapse.check import CheckConfig, check
from megatron_ext.collapse.controls import Controls
from megatron_ext.collapse.curve import Curve, make_curve
from megatron_ext.collapse.curve_file import write_curve
from megatron_ext.collapse.history import History
from megatron_ext.collapse.monitor import Monitor
from megatron_ext.collapse.observations import observe_all
from megatron_ext.collapse.picture import draw, run_picture
from megatron_ext.collapse.raw_rules import first_raw_alarm
from megatron_ext.collapse.recipe import tau_for
from megatron_ext.collapse.sources import SourceOptions, read_history
from megatron_ext.corpus import VOCABULARY_SIZE, build_corpus
from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine

REPOSITORY = Path(__file__).resolve().parent.parent
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "__pycache__")
LAYERS = 2
HEAD_SIZE = 16
SEQUENCE_LENGTH = 128
EVALUATIONS = 50
VALIDATION_BYTES = 48 * 1024
CHECKPOINTS = 10
FAULT_FROM = 0.6
VALIDATION = "lm loss validation"


@dataclass(frozen=True)
class Member:
    """One size of the family.

    Attributes:
        width: hidden size.
        base_width: the one that the learning rate is meant for.
        tpp: tokens per parameter.
        base_batch: sequences per batch at `base_width`.
        lr: peak learning rate at `base_width`.
    """

    width: int
    base_width: int
    tpp: float
    base_batch: int
    lr: float

    @property
    def params(self) -> int:
        """Parameters: layers, norms and the two embeddings; output and input embedding are one."""
        per_layer = 12 * self.width**2 + 13 * self.width
        embeddings = (VOCABULARY_SIZE + SEQUENCE_LENGTH) * self.width
        return LAYERS * per_layer + embeddings + 2 * self.width

    @property
    def batch(self) -> int:
        """Sequences per batch, growing with the square root of the tokens; even."""
        base = Member(self.base_width, self.base_width, self.tpp, self.base_batch, self.lr)
        return 2 * max(round(self.base_batch * math.sqrt(self.params / base.params) / 2), 1)

    @property
    def iterations(self) -> int:
        """Steps of training, a multiple of the number of evaluations."""
        steps = self.tpp * self.params / (self.batch * SEQUENCE_LENGTH)
        return max(round(steps / EVALUATIONS), 1) * EVALUATIONS

    @property
    def hidden_lr(self) -> float:
        """Peak learning rate of hidden weights, as muP scales it."""
        return self.lr * self.base_width / self.width

    @property
    def tau(self) -> float:
        """The family's tau at its tokens per parameter."""
        return tau_for(self.tpp)

    @property
    def weight_decay(self) -> float:
        """What makes tau the family's for hidden weights."""
        return 1 / (self.hidden_lr * self.tau * self.iterations)

    @property
    def controls(self) -> Controls:
        """What decides the shape of its curve; the schedule is read from the log."""
        tokens = float(self.iterations * self.batch * SEQUENCE_LENGTH)
        return Controls(
            params=float(self.params), tokens=tokens, given_tau=self.tau, steps=self.iterations
        )

    def flags(self) -> list[str]:
        """Megatron's flags for model, schedule and optimizer."""
        every = self.iterations // EVALUATIONS
        flags: dict[str, object] = {
            "--num-layers": LAYERS,
            "--hidden-size": self.width,
            "--num-attention-heads": self.width // HEAD_SIZE,
            "--seq-length": SEQUENCE_LENGTH,
            "--max-position-embeddings": SEQUENCE_LENGTH,
            "--micro-batch-size": self.batch // 2,
            "--global-batch-size": self.batch,
            "--train-iters": self.iterations,
            "--lr": f"{self.lr:.6g}",
            "--min-lr": 0,
            "--lr-decay-style": "linear",
            "--lr-warmup-fraction": 0.1,
            "--weight-decay": f"{self.weight_decay:.6g}",
            "--adam-beta2": 0.95,
            "--clip-grad": 1.0,
            "--attention-dropout": 0,
            "--hidden-dropout": 0,
            "--init-method-std": 0.06,
            "--mup-base-hidden-size": self.base_width,
            "--tokenizer-type": "NullTokenizer",
            "--vocab-size": VOCABULARY_SIZE,
            "--make-vocab-size-divisible-by": 1,
            "--eval-interval": every,
            # About all of the held-out text.
            "--eval-iters": max(VALIDATION_BYTES // (self.batch * SEQUENCE_LENGTH), 1),
            "--log-interval": 1,
            "--save-interval": max(self.iterations // CHECKPOINTS, 1),
            "--ckpt-format": "torch",
            "--num-workers": 0,
        }
        return ["--use-mup", *(str(word) for pair in flags.items() for word in pair)]


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, compare, write the results.

    Returns:
        0 if all is trained, 1 if a training failed, 2 for a wrong flag, 130 if interrupted.
    """
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "family")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 112, 176, 272],
        help="hidden sizes, multiples of 16, ascending (default: %(default)s: 0.1M to 1.9M)",
    )
    parser.add_argument("--tpp", type=float, default=20.0, help="tokens per parameter")
    parser.add_argument("--batch", type=int, default=16, help="sequences per batch of the smallest")
    parser.add_argument("--lr", type=float, default=8e-3, help="peak of the smallest")
    parser.add_argument("--fault", action="store_true", help="also train one run with a fault")
    parser.add_argument("--text", type=Path, help="folder of .py files instead of the library")
    args = parser.parse_args(argv)
    try:
        members = _members(args)
        _train_all(args, members)
        print(_report(args, members))
    except UsageError as error:
        print(f"train_family: error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"train_family: error: training failed, see {error.stderr}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_family: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _members(args: argparse.Namespace) -> list[Member]:
    wrong = [width for width in args.widths if width < HEAD_SIZE or width % HEAD_SIZE]
    if wrong or args.widths != sorted(set(args.widths)):
        raise UsageError(f"--widths {args.widths} are not ascending multiples of {HEAD_SIZE}")
    if not args.tpp > 0 or args.batch < 2 or not args.lr > 0:
        raise UsageError("--tpp and --lr must be above 0, --batch at least 2")
    base = args.widths[0]
    return [Member(width, base, args.tpp, args.batch, args.lr) for width in args.widths]


def _train_all(args: argparse.Namespace, members: list[Member]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "held-out.idx").exists():
        _build_corpora(args.text or Path(sysconfig.get_path("stdlib")), args.out)
    for member in members:
        _train(args.out, f"width-{member.width}", member, ranks=1)
    if args.fault:
        member = members[len(members) // 2]
        healthy, faulty = (args.out / f"{name}-{member.width}" for name in ("width", "fault"))
        every = max(member.iterations // CHECKPOINTS, 1)
        start = int(FAULT_FROM * CHECKPOINTS) * every
        if not faulty.exists():  # it starts from the healthy run's checkpoint
            checkpoint = f"iter_{start:07d}"
            faulty.mkdir()
            shutil.copytree(healthy / checkpoint, faulty / checkpoint)
            (faulty / "latest_checkpointed_iteration.txt").write_text(str(start))
        _train(args.out, f"fault-{member.width}", member, ranks=2, fault_from=start)


def _build_corpora(text: Path, out: Path) -> None:
    """Make datasets of most files and of a few held out, small enough to be read whole each time.

    An evaluation on other text each time would add the difference between texts to the curve.
    """
    files = sorted(
        file for file in text.rglob("*.py") if not set(file.relative_to(text).parts) & {*LEFT_OUT}
    )
    held_out: list[Path] = []
    size = 0
    for file in files[:: max(len(files) // 50, 1)]:
        if size < VALIDATION_BYTES and 1000 < file.stat().st_size < VALIDATION_BYTES:
            held_out.append(file)
            size += file.stat().st_size
    if len(held_out) == len(files) or not held_out:
        raise UsageError(f"{text}: holds too little text for a training and a held-out part")
    for name, chosen in (("text", [f for f in files if f not in held_out]), ("held-out", held_out)):
        folder = out / f"{name}-files"
        folder.mkdir(exist_ok=True)
        for number, file in enumerate(chosen):
            shutil.copyfile(file, folder / f"{number:05d}.py")
        build_corpus([folder], out / name, suffixes=(".py",), force=True)
        shutil.rmtree(folder)


def _train(out: Path, name: str, member: Member, ranks: int, fault_from: int | None = None) -> None:
    """Train one run to its end, from its last checkpoint if there is one."""
    log, folder = out / f"{name}.log", out / name
    done = _last_iteration(log)
    if done >= member.iterations:
        return
    script = "pretrain_gpt.py" if fault_from is None else "pretrain_with_fault.py"
    words = [
        *(sys.executable, "-m", "megatron_ext", "--cpu", str(REPOSITORY / "scripts" / script)),
        *member.flags(),
        *("--train-data-path", str(out / "text"), "--valid-data-path", str(out / "held-out")),
        *("--test-data-path", str(out / "held-out"), "--data-cache-path", str(out / "cache")),
        *("--save", str(folder), "--load", str(folder)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "PYTHONWARNINGS": "ignore::UserWarning",
        "PYTHONPATH": os.pathsep.join(
            [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    if fault_from is not None:
        environment["MEGATRON_EXT_FAULT_FROM"] = str(fault_from)
    with (
        log.open("a") as output,
        ProgressLine(f"train {name}", member.iterations, "iterations") as progress,
    ):
        processes = [
            subprocess.Popen(
                words,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output if rank == ranks - 1 else subprocess.DEVNULL,
                stderr=subprocess.STDOUT if rank == ranks - 1 else subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        try:
            while processes[-1].poll() is None:
                try:
                    processes[-1].wait(timeout=2)
                except subprocess.TimeoutExpired:
                    progress.update(_last_iteration(log))
        finally:
            for process in processes:
                if process.poll() is None and processes[-1].returncode != 0:
                    process.send_signal(signal.SIGTERM)
                process.wait()
    if processes[-1].returncode or _last_iteration(log) < member.iterations:
        raise subprocess.CalledProcessError(processes[-1].returncode, words, stderr=str(log))
    for old in folder.glob("iter_*"):  # what a faulty run may start from, and the last one
        number = int(old.name.removeprefix("iter_"))
        every = max(member.iterations // CHECKPOINTS, 1)
        if number not in (int(FAULT_FROM * CHECKPOINTS) * every, member.iterations):
            shutil.rmtree(old)


def _last_iteration(log: Path) -> int:
    try:
        return int(read_history(str(log)).steps[-1])
    except UsageError:
        return 0


def _report(args: argparse.Namespace, members: list[Member]) -> str:
    """Compare every run with the next smaller one, and write what was found."""
    out: Path = args.out
    histories = {
        f"width-{member.width}": _history(out, f"width-{member.width}") for member in members
    }
    curves = [make_curve(histories[f"width-{member.width}"], member.controls) for member in members]
    for member, curve in zip(members, curves, strict=True):
        write_curve(curve, out / f"width-{member.width}.json", force=True)
    found: dict[str, Any] = {"tpp": args.tpp, "tau": members[0].tau, "runs": []}
    pictures = []
    for member, reference in zip(members[1:], curves[:-1], strict=True):
        history = histories[f"width-{member.width}"]
        entry, picture = _compare(history, member, reference)
        found["runs"].append(entry)
        pictures.append(picture)
    if args.fault:
        middle = len(members) // 2
        member = members[middle]
        healthy = histories[f"width-{member.width}"]
        faulty = _history(out, f"fault-{member.width}")
        before = healthy.steps <= FAULT_FROM * member.iterations
        after = faulty.steps > FAULT_FROM * member.iterations
        joined = History(
            source=f"fault-{member.width}",
            steps=np.concatenate((healthy.steps[before], faulty.steps[after])),
            losses=np.concatenate((healthy.losses[before], faulty.losses[after])),
            metadata=healthy.metadata,
            split="validation",
            end_step=healthy.end,
            restarts=(FAULT_FROM * member.iterations,),
        )
        histories[joined.source] = joined
        entry, picture = _compare(joined, member, curves[max(middle - 1, 0)])
        entry["raw_rules"] = first_raw_alarm(joined.fractions, joined.losses)
        found["fault"] = entry
        pictures.append(picture)
    (out / "family.json").write_text(json.dumps(found, indent=2) + "\n")
    (out / "family.png").write_bytes(draw(curves[:1], pictures))
    with (out / "family.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "params", "step", "tokens", "val_loss"])
        for name, history in histories.items():
            member = next(m for m in members if name.endswith(f"-{m.width}"))
            for step, loss in zip(history.steps, history.losses, strict=True):
                tokens = step * member.batch * SEQUENCE_LENGTH
                writer.writerow(
                    [name, member.params, f"{step:.0f}", f"{tokens:.0f}", f"{loss:.6f}"]
                )
    return _table(members, found, curves[0])


def _history(out: Path, name: str) -> History:
    return read_history(str(out / f"{name}.log"), SourceOptions(column=VALIDATION))


def _compare(history: History, member: Member, reference: Curve) -> tuple[dict[str, Any], Any]:
    config = CheckConfig(given=member.controls)
    result = check(history, [reference], config)
    half = check(history.until(0.5), [reference], config).predicted_final_loss
    entry = {
        "run": Path(history.source).stem,
        "reference": Path(reference.source).stem,
        "params": member.params,
        "comparable": result.comparable,
        "reasons": list(result.reasons),
        "final_loss": result.final_loss,
        "predicted_at_half": half,
        "mean_deviation": result.mean_deviation,
        "steepness": result.steepness,
        "alarms": [alarm.to_json() for alarm in result.alarms],
    }
    monitor = Monitor(reference, span=reference.span)
    monitor.observe_all(observe_all(history.fractions, history.losses, history.steps))
    entry["noise"] = monitor.noise
    return entry, run_picture(history, result, [reference], config.smooth_steps)


def _table(members: list[Member], found: dict[str, Any], smallest: Curve) -> str:
    lines = [
        f"{found['tpp']:g} tokens per parameter, tau {found['tau']:.3f}; every run is compared "
        f"with the next smaller one; the smallest: width {members[0].width}, {members[0].params} "
        f"parameters, final loss {smallest.final_loss:.4f}"
    ]
    for entry in [*found["runs"], *filter(None, [found.get("fault")])]:
        deviation = entry["mean_deviation"]
        shown = "-" if deviation is None else f"{deviation:.2%}"
        alarms = ", ".join(f"{a['kind']} at t = {a['t']:.2f}" for a in entry["alarms"]) or "none"
        lines.append(
            f"{Path(entry['run']).stem}: {entry['params']} parameters, final loss "
            f"{entry['final_loss']:.4f}, deviation {shown}, alarms: {alarms}"
        )
        lines += [f"  {reason}" for reason in entry["reasons"]]
    return "\n".join(lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
