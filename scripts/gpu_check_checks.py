"""The checks of `gpu_check.py`: each small, each on its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpu_check_machine import has
from gpu_check_queue import queue_depths
from gpu_check_runs import RRFP, Record, RunError, Runs, Training

PP2, PP4 = (f"--pipeline-model-parallel-size {stages}" for stages in (2, 4))
TE = "--transformer-impl transformer_engine"
NIXL = "--pipeline-schedule rrfp --rrfp-transport nixl"
MUON = f"{PP2} {RRFP} --optimizer muon"

PP1_MEGATRON = Training("pp1-megatron", "PP1, Megatron", 1, "")
PP1_2BW = Training("pp1-2bw", "PP1, 2BW", 1, f"{RRFP} --pipedream-2bw")
PP2_MEGATRON = Training("pp2-megatron", "PP2, Megatron 1F1B", 2, PP2)
PP2_RRFP = Training("pp2-rrfp", "PP2, RRFP, gloo", 2, f"{PP2} {RRFP}", traced=True)
PP2_NIXL = Training("pp2-nixl", "PP2, RRFP, nixl", 2, f"{PP2} {NIXL}")
PP4_MEGATRON = Training("pp4-megatron", "PP4, Megatron 1F1B", 4, PP4)
PP4_RRFP = Training("pp4-rrfp", "PP4, RRFP, gloo", 4, f"{PP4} {RRFP}")
PP2_TP2 = Training(
    "pp2-tp2", "PP2 x TP2, RRFP, gloo", 4, f"{PP2} {RRFP} --tensor-model-parallel-size 2"
)
TE_MEGATRON = Training("te-megatron", "PP2, Megatron 1F1B, Transformer Engine", 2, f"{PP2} {TE}")
TE_RRFP = Training("te-rrfp", "PP2, RRFP, Transformer Engine", 2, f"{PP2} {RRFP} {TE}")
MUON_FLUSHED = Training("muon", "PP2, RRFP, Muon", 2, MUON, long=True)
MUON_2BW = Training("muon-2bw", "PP2, 2BW, Muon", 2, f"{MUON} --pipedream-2bw", long=True)

BOUND = 1e-3
"""Relative difference of losses that is still taken for rounding, where kernels vary."""


class CheckError(Exception):
    """A check found what must not be; the message says what."""


class SkippedError(Exception):
    """A check cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Check:
    """One question."""

    name: str
    run: Callable[[Runs, dict[str, Any], dict[str, Any]], str]
    """Given the runs, the machine and a place for figures, says what it found in one line."""


@dataclass
class Outcome:
    """Its answer."""

    name: str
    status: str
    """ok, FAILED or skipped."""
    detail: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


def run_check(check: Check, runs: Runs, machine: dict[str, Any]) -> Outcome:
    """Run one check; whatever goes wrong is its outcome."""
    started = time.monotonic()
    figures: dict[str, Any] = {}
    try:
        status, detail = "ok", check.run(runs, machine, figures)
    except SkippedError as error:
        status, detail = "skipped", str(error)
    except (CheckError, RunError) as error:
        status, detail = "FAILED", str(error)
    except Exception as error:  # the other checks still have something to say
        status, detail = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]
    return Outcome(check.name, status, detail, round(time.monotonic() - started, 1), figures)


def _environment(runs: Runs, machine: dict[str, Any], figures: dict[str, Any]) -> str:
    gpu, packages = machine["gpu"], machine["packages"]
    figures.update(packages)
    if not packages["megatron-core"] and not has("megatron"):
        raise CheckError("no Megatron: pip install 'megatron_ext[megatron]'")
    if not runs.cpu and int(gpu["capability"].split(".")[0]) < 8:
        raise CheckError(f"{gpu['name']} has no bf16 (compute capability below 8.0)")
    there = f"{gpu['name']}, {gpu['memory_gib']} GiB" if gpu else "CPU"
    names = ", ".join(f"{name} {version or 'none'}" for name, version in packages.items())
    return f"{there}; {names}"


def _learns(record: Record) -> str:
    first, last = record.losses[0], record.losses[-1]
    if not last < first:
        raise CheckError(f"{record.training.title}: the loss went from {first:.4f} to {last:.4f}")
    return f"loss {first:.4f} to {last:.4f}"


def _pp1(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    record = runs.get(PP1_MEGATRON)
    schedule = record.ranks[0]["steps"][0]["schedule"]
    if schedule != "forward_backward_no_pipelining":
        raise CheckError(f"without our flags Megatron ran {schedule}")
    figures["tokens_per_s"] = record.tokens_per_s
    return _learns(record)


def _pp1_2bw(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    reference, ours = runs.get(PP1_MEGATRON), runs.get(PP1_2BW)
    found = _learns(ours)
    # The first two batches compute with the first weights, one as Megatron does.
    difference = abs(ours.losses[0] / reference.losses[0] - 1)
    figures["first_loss_difference"] = difference
    if difference > (0 if runs.cpu else BOUND):
        raise CheckError(f"its first loss differs from Megatron's by {difference:.1e}")
    return f"{found}; first loss as Megatron's"


def _same(reference: Record, ours: Record, cpu: bool, figures: dict[str, Any]) -> str:
    """Compare two runs; on the CPU nothing but the same bits will do."""
    schedules = [record.ranks[0]["steps"][0]["schedule"] for record in (reference, ours)]
    if schedules != ["forward_backward_pipelining_without_interleaving", "StageExecutor"]:
        raise CheckError(f"the schedules that ran were {' and '.join(schedules)}")
    results = [
        [[step["result"] for step in rank["steps"]] for rank in record.ranks]
        for record in (reference, ours)
    ]
    weights = [[rank["weights"] for rank in record.ranks] for record in (reference, ours)]
    figures["identical"] = results[0] == results[1] and weights[0] == weights[1]
    pairs = zip(reference.losses, ours.losses, strict=True)
    figures["loss_difference"] = max(abs(one / other - 1) for one, other in pairs)
    if figures["identical"]:
        return f"losses, norms and weights identical over {len(ours.losses)} iterations"
    found = f"losses differ by {figures['loss_difference']:.1e} at most"
    if cpu or figures["loss_difference"] > BOUND:
        raise CheckError(f"{found}, or gradient norms or weights do")
    return f"not bit-identical: {found} (bound {BOUND:g})"


def _pp2(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    return _same(runs.get(PP2_MEGATRON), runs.get(PP2_RRFP), runs.cpu, figures)


def _pp4(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    return _same(runs.get(PP4_MEGATRON), runs.get(PP4_RRFP), runs.cpu, figures)


def _nixl(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    if not has("nixl"):
        raise SkippedError("nixl is not installed (pip install 'megatron_ext[nixl]')")
    return _same(runs.get(PP2_MEGATRON), runs.get(PP2_NIXL), runs.cpu, figures)


def _split(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    record = runs.get(PP2_RRFP)
    kinds = {kind for rank in record.ranks for kind in rank["steps"][0]["kinds"]}
    figures["peak_live"] = max(rank["steps"][0]["peak_live"] for rank in record.ranks)
    if "WEIGHT" not in kinds:
        raise CheckError(f"no weight gradient was a task of its own, only {sorted(kinds)}")
    return f"weight gradients are tasks; at most {figures['peak_live']} microbatches held"


def _transformer_engine(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    if not has("transformer_engine"):
        raise SkippedError("Transformer Engine is not installed")
    if runs.cpu:
        raise SkippedError("Transformer Engine needs a GPU")
    return _same(runs.get(TE_MEGATRON), runs.get(TE_RRFP), runs.cpu, figures)


def _queue(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    depths = queue_depths(runs.get(PP2_RRFP).trace, device=not runs.cpu)
    figures["tasks"] = len(depths)
    figures["deepest"] = max(depths)
    figures["mean"] = sum(depths) / len(depths)
    if figures["deepest"] > 1:
        raise CheckError(f"a task was chosen while {figures['deepest']} were unfinished")
    return f"{len(depths)} tasks, each chosen with at most {figures['deepest']} unfinished"


def _overheads(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    dispatch = runs.get(PP2_RRFP).median("dispatch_us")
    agreement = runs.get(PP2_TP2).median("agreement_us")
    if dispatch is None or agreement is None:
        raise CheckError("no decision was timed")
    figures.update(dispatch_us=dispatch, agreement_us=agreement)
    return f"a decision takes {dispatch:.1f} us, with tensor parallelism {agreement:.1f} us"


def _throughput(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    for stages, reference, ours in (
        (2, PP2_MEGATRON, PP2_RRFP),
        (4, PP4_MEGATRON, PP4_RRFP),
    ):
        figures[f"pp{stages}"] = runs.get(reference).iteration_ms / runs.get(ours).iteration_ms
    found = ", ".join(f"{name.upper()} {ratio:.2f}x" for name, ratio in figures.items())
    return f"RRFP over Megatron's 1F1B, all processes on one device: {found}"


def _muon(runs: Runs, _: dict[str, Any], figures: dict[str, Any]) -> str:
    if not has("emerging_optimizers"):
        raise SkippedError("emerging-optimizers, which brings Muon, is not installed")
    ends = {}
    for name, training in (("flushed", MUON_FLUSHED), ("2bw", MUON_2BW)):
        record = runs.get(training)
        _learns(record)
        tail = record.losses[-max(1, len(record.losses) // 10) :]
        ends[name] = figures[name] = sum(tail) / len(tail)
    speed = runs.get(MUON_FLUSHED).iteration_ms / runs.get(MUON_2BW).iteration_ms
    figures["speedup"] = speed
    return f"last losses {ends['flushed']:.4f} flushed, {ends['2bw']:.4f} with 2BW; {speed:.2f}x"


CHECKS = (
    Check("environment", _environment),
    Check("pp1", _pp1),
    Check("pp1-2bw", _pp1_2bw),
    Check("pp2-gloo", _pp2),
    Check("pp2-nixl", _nixl),
    Check("pp4-gloo", _pp4),
    Check("weight-gradients", _split),
    Check("transformer-engine", _transformer_engine),
    Check("one-task-queued", _queue),
    Check("overheads", _overheads),
    Check("throughput", _throughput),
    Check("muon-2bw", _muon),
)
