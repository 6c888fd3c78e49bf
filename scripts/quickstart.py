"""Train a small GPT twice, with Megatron's 1F1B and with RRFP, and compare every iteration.

Run it through `scripts/quickstart.sh`, which makes the environment first. Everything it writes
is below `out/quickstart`; a second run replaces it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from megatron_ext import __version__
from megatron_ext.corpus import VOCABULARY_SIZE, CorpusSummary, build_corpus
from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine
from megatron_ext.training_log import (
    IterationReport,
    parse_parameter_counts,
    parse_training_log,
)

REPOSITORY = Path(__file__).resolve().parent.parent

STAGES = 4
HIDDEN_SIZE = 96
MICRO_BATCH = 2
GLOBAL_BATCH = 32
SEQUENCE_LENGTH = 128

# Not the library's own text: installed packages, and tests with broken files on purpose.
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "__pycache__")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Every rank warns of every GPU package that is absent; in a log of a CPU run that is noise.
    "PYTHONWARNINGS": "ignore::UserWarning",
}

# Longer than four interpreters need to import Megatron on a slow machine.
SILENCE_LIMIT = 180.0
LOG_TAIL = 40


class RunError(Exception):
    """A training run that failed; the message says which and why."""


@dataclass(frozen=True)
class Schedule:
    """One of the two ways to order the pipeline.

    Attributes:
        name: key in the summary and name of the log file.
        title: what people call it.
        flags: flags that choose it.
    """

    name: str
    title: str
    flags: tuple[str, ...]


MEGATRON = Schedule("megatron", "Megatron 1F1B", ("--pipeline-schedule", "megatron"))
RRFP = Schedule(
    "rrfp",
    "RRFP",
    ("--pipeline-schedule", "rrfp", "--rrfp-hint", "bf", "--rrfp-live-limit", "2p"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the corpus, train twice, print the table, write the summary.

    Args:
        argv: the words after the script's name; those of this process if None.

    Returns:
        0 if both runs printed the same numbers, 1 if they did not or one failed, 2 if there is
        no text to train on, 130 if interrupted.
    """
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--iterations",
        metavar="N",
        type=_positive,
        default=40,
        help="iterations to train (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=REPOSITORY / "out" / "quickstart",
        help="where everything is written (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    # Ctrl-C and a plain `kill` end the same way: with the training processes stopped.
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.default_int_handler)
    try:
        return compare_schedules(args.out, args.iterations)
    except RunError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("quickstart: interrupted; the training processes are stopped", file=sys.stderr)
        return 130


def compare_schedules(out: Path, iterations: int) -> int:
    """Do the whole quickstart and return its exit status.

    Args:
        out: directory for the corpus, the logs and `summary.json`.
        iterations: iterations to train under each schedule.

    Raises:
        RunError: a training run failed.
        UsageError: this Python has no library sources to train on.
    """
    started = time.monotonic()
    console = Console(soft_wrap=True, highlight=False)
    _clear(out)
    console.print(f"Building a corpus from {sysconfig.get_path('stdlib')} ...")
    corpus = _standard_library_corpus(out / "corpus")
    console.print(
        f"{corpus.documents:,} files, {corpus.tokens:,} byte tokens. Training a GPT in {STAGES} "
        f"pipeline stages for {iterations} iterations, twice:",
    )
    reports: dict[str, list[IterationReport]] = {}
    seconds: dict[str, float] = {"corpus": time.monotonic() - started}
    parameters = 0
    for schedule in (MEGATRON, RRFP):
        before = time.monotonic()
        lines = train(schedule, corpus, out, iterations)
        seconds[schedule.name] = time.monotonic() - before
        reports[schedule.name] = _complete_reports(schedule, lines, iterations, out)
        parameters = _count_parameters(lines)
        median = statistics.median(report.time_ms for report in reports[schedule.name])
        console.print(
            f"  {schedule.title}: done in {seconds[schedule.name]:.0f} s, "
            f"{median:.0f} ms per iteration",
        )
    seconds["total"] = time.monotonic() - started
    summary = summarize(reports[MEGATRON.name], reports[RRFP.name])
    summary |= {
        "parameters": parameters,
        "pipeline_parallel": STAGES,
        "microbatches": GLOBAL_BATCH // MICRO_BATCH,
        "tokens_per_iteration": GLOBAL_BATCH * SEQUENCE_LENGTH,
        "corpus": asdict(corpus),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "versions": _versions(),
    }
    _write(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    _print_result(console, summary, out)
    return 0 if summary["identical"] else 1


def summarize(
    megatron: Sequence[IterationReport], rrfp: Sequence[IterationReport]
) -> dict[str, Any]:
    """Compare two runs, iteration by iteration.

    Args:
        megatron: reports under Megatron's schedule.
        rrfp: reports under RRFP, for the same iterations.

    Returns:
        What `summary.json` holds about the runs. An iteration is identical when both printed
        the same finite loss and gradient norm, to the last digit.
    """
    rows = []
    for ours, theirs in zip(rrfp, megatron, strict=True):
        same = _finite(ours) and (ours.iteration, ours.loss, ours.grad_norm) == (
            theirs.iteration,
            theirs.loss,
            theirs.grad_norm,
        )
        rows.append(
            {
                "iteration": theirs.iteration,
                "megatron": _numbers(theirs),
                "rrfp": _numbers(ours),
                "identical": same,
            }
        )
    medians = {
        name: round(statistics.median(report.time_ms for report in reports), 1)
        for name, reports in (("megatron", megatron), ("rrfp", rrfp))
    }
    return {
        "identical": all(row["identical"] for row in rows),
        "iterations": rows,
        "median_time_ms": medians,
    }


def train(schedule: Schedule, corpus: CorpusSummary, out: Path, iterations: int) -> list[str]:
    """Train under one schedule, showing progress, and return the lines of its log.

    Raises:
        RunError: a process failed, or all were silent for longer than SILENCE_LIMIT.
    """
    log_path = out / f"{schedule.name}.log"
    command = _command(schedule, corpus, out, iterations)
    lines: list[str] = []
    with (
        log_path.open("w") as log,
        ProgressLine(f"  {schedule.title}", iterations, "iterations", sys.stdout) as progress,
    ):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT},
            # Ctrl-C must reach this script alone: it then stops the rest in order.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            done, note = 0, "starting"
            for line in _lines_or_silence(process.stdout):
                if line is not None:
                    log.write(line)
                    log.flush()
                    lines.append(line)
                    for report in parse_training_log([line]):
                        done, note = report.iteration, f"loss {_digits(report.loss)}"
                progress.update(done, note)
            status = process.wait()
        except TimeoutError:
            raise _failure(
                schedule, f"printed nothing for {SILENCE_LIMIT:.0f} s", lines, log_path
            ) from None
        finally:
            _stop(process)
    if status != 0:
        raise _failure(schedule, f"ended with status {status}", lines, log_path)
    return lines


def _command(
    schedule: Schedule, corpus: CorpusSummary, out: Path, iterations: int
) -> tuple[str, ...]:
    """Return the command line of one training run."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(STAGES))
    script = ("-m", "megatron_ext", "--cpu", str(REPOSITORY / "scripts" / "pretrain_gpt.py"))
    model = f"""
        --pipeline-model-parallel-size {STAGES}
        --num-layers 8 --hidden-size {HIDDEN_SIZE} --num-attention-heads 4
        --seq-length {SEQUENCE_LENGTH} --max-position-embeddings {SEQUENCE_LENGTH}
        --attention-dropout 0 --hidden-dropout 0
    """
    training = f"""
        --micro-batch-size {MICRO_BATCH} --global-batch-size {GLOBAL_BATCH}
        --train-iters {iterations} --eval-interval 1000 --eval-iters 0 --log-interval 1
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
        --clip-grad 1.0 --weight-decay 0.1 --seed 1234 --split 98,1,1
    """
    on_cpu = """
        --distributed-backend gloo --transformer-impl local --num-workers 0
        --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
        --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    """
    cache = ("--data-cache-path", str(out / "cache"))
    flags = (*model.split(), *training.split(), *on_cpu.split(), *corpus.megatron_flags, *cache)
    return (sys.executable, *launcher, *script, *flags, *schedule.flags)


def _lines_or_silence(stream: IO[str]) -> Iterator[str | None]:
    """Yield each line of a stream as it comes, and None each second without one.

    Raises:
        TimeoutError: no line came for SILENCE_LIMIT seconds.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    heard = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            if time.monotonic() - heard > SILENCE_LIMIT:
                raise TimeoutError from None
            yield None
            continue
        if line is None:
            return
        heard = time.monotonic()
        yield line


def _stop(process: subprocess.Popen[str]) -> None:
    """End a launcher and the training processes below it; nothing happens if they are gone."""
    if process.poll() is not None:
        return
    # An impatient second Ctrl-C must not leave training processes behind.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The launcher gives each worker a session of its own, so no one signal reaches them all.
    workers = _children(process.pid)
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        for pid in (*workers, process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
    signal.signal(signal.SIGINT, before)


def _children(pid: int) -> list[int]:
    """Return the process ids of the direct children of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _failure(schedule: Schedule, reason: str, lines: Sequence[str], log_path: Path) -> RunError:
    """Print the end of a failed run's log and return the error to raise."""
    # The launcher's own report follows the cause and says nothing about it.
    end = next(
        (index for index, line in enumerate(lines) if "torch/distributed/elastic" in line),
        len(lines),
    )
    tail = lines[max(0, end - LOG_TAIL) : end]
    sys.stderr.write("".join(tail))
    return RunError(f"the {schedule.title} run {reason}; the whole log is {log_path}")


def _complete_reports(
    schedule: Schedule, lines: Sequence[str], iterations: int, out: Path
) -> list[IterationReport]:
    """Return the reports of a finished run.

    Raises:
        RunError: the run did not report every iteration.
    """
    reports = parse_training_log(lines)
    if [report.iteration for report in reports] != list(range(1, iterations + 1)):
        raise _failure(
            schedule,
            f"reported {len(reports)} iterations instead of {iterations}",
            lines,
            out / f"{schedule.name}.log",
        )
    return reports


def _count_parameters(lines: Sequence[str]) -> int:
    """Return the model's size, counting the embedding that first and last stage share once."""
    padded_vocabulary = math.ceil(VOCABULARY_SIZE / 128) * 128
    return sum(parse_parameter_counts(lines)) - padded_vocabulary * HIDDEN_SIZE


def _standard_library_corpus(prefix: Path) -> CorpusSummary:
    """Build the corpus from the source files of this Python's own library."""
    library = Path(sysconfig.get_path("stdlib"))
    with ProgressLine("corpus", None, "files") as line:
        return build_corpus(
            [library],
            prefix,
            suffixes=[".py"],
            exclude=LEFT_OUT,
            force=True,
            progress=lambda done, total: line.update(done, total=total),
        )


def _clear(out: Path) -> None:
    """Remove what an earlier run wrote: Megatron would reuse a cache that no longer fits."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "cache", ignore_errors=True)
    for name in ("summary.json", f"{MEGATRON.name}.log", f"{RRFP.name}.log"):
        (out / name).unlink(missing_ok=True)


def _print_result(console: Console, summary: dict[str, Any], out: Path) -> None:
    """Print the table and the verdict."""
    table = Table(title=f"{summary['parameters']:,} parameters, {STAGES} pipeline stages")
    for heading in ("iteration", "loss, 1F1B", "loss, RRFP", "identical", "ms, 1F1B", "ms, RRFP"):
        table.add_column(heading, justify="center" if heading == "identical" else "right")
    for row in summary["iterations"]:
        table.add_row(
            str(row["iteration"]),
            _digits(row["megatron"]["loss"]),
            _digits(row["rrfp"]["loss"]),
            "yes" if row["identical"] else "[red]NO[/red]",
            f"{row['megatron']['time_ms']:.0f}",
            f"{row['rrfp']['time_ms']:.0f}",
        )
    medians = summary["median_time_ms"]
    table.add_section()
    table.add_row(
        "median", "", "", "", f"{medians['megatron']:.0f}", f"{medians['rrfp']:.0f}", style="bold"
    )
    console.print(table)
    different = [row["iteration"] for row in summary["iterations"] if not row["identical"]]
    verdict = (
        f"[red]Not identical from iteration {different[0]} on.[/red]"
        if different
        else "Every loss and gradient norm is identical."
    )
    console.print(f"{verdict} {summary['seconds']['total']:.0f} s in all; {out / 'summary.json'}")


def _digits(loss: float | None) -> str:
    """Return a loss with the digits Megatron prints."""
    return "none" if loss is None else f"{loss:.6f}"


def _finite(report: IterationReport) -> bool:
    """Whether a report has a loss and a gradient norm that are numbers."""
    values = (report.loss, report.grad_norm)
    return all(value is not None and math.isfinite(value) for value in values)


def _numbers(report: IterationReport) -> dict[str, float | None]:
    """Return a report as the summary holds it; JSON has no NaN, so that becomes null."""
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in asdict(report).items()
        if name != "iteration"
    }


def _positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of iterations of at least 1")
    return value


def _versions() -> dict[str, str]:
    """Return the versions of what took part."""
    packages = ("torch", "megatron-core", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "megatron_ext": __version__, **versions}


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
