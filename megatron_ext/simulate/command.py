"""`megatron-ext simulate`: what a pipeline would take, before it runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine
from megatron_ext.simulate import flags, show
from megatron_ext.simulate.job import Job, Memory, Summary, summarize
from megatron_ext.simulate.pipeline import BASELINE, Policy
from megatron_ext.simulate.recommend import (
    Candidate,
    candidates,
    measure,
    recommend,
    searched_hints,
    searched_limits,
)
from megatron_ext.simulate.replay import Replay
from megatron_ext.simulate.replay_flags import given_replay, traced_policy
from megatron_ext.simulate.trace_files import write_traces

add_arguments = flags.add_arguments


def run(args: argparse.Namespace) -> int:
    """Do what the flags ask for.

    Raises:
        UsageError: They do not go together, or a file cannot be used.
    """
    flags.check_modes(args)
    if args.preset:
        from megatron_ext.simulate.paper_comparison import print_comparison

        print_comparison(args.preset, flags.given_seeds(args))
        return 0
    if args.from_trace is not None:
        return _from_trace(args)
    job = flags.given_job(args)
    if args.recommend:
        result, text = _recommend(args, job)
        print(json.dumps(result, indent=1) if args.json else text)
        return 0
    return _simulate(args, job)


def _simulate(args: argparse.Namespace, job: Job) -> int:
    """One policy on the job that the flags describe."""
    policy, memory, seeds = (
        flags.given_policy(args),
        flags.given_memory(args),
        flags.given_seeds(args),
    )
    with ProgressLine("simulate", None, "tasks") as progress:
        (summary,) = summarize(
            job,
            [policy],
            seeds,
            baseline=not args.no_baseline,
            on_progress=lambda done, total: progress.update(done, total=total),
        )
    if args.trace is not None:
        outcome = job.run(job.draw(seeds[0]), policy, record=True)
        write_traces(args.trace, job.pipeline, policy, outcome)
    peak_gb = memory.peak_gb(summary.peak_live, job.pipeline.chunks, policy)
    if args.json:
        result = _record(policy, summary, peak_gb) | {"seeds": list(seeds)}
        print(json.dumps(result, indent=1))
    else:
        show.show_summary(job.pipeline, policy, summary, peak_gb, len(seeds))
    return 0


def _from_trace(args: argparse.Namespace) -> int:
    """Predict the traced run, then answer what else it could be."""
    memory, seeds = flags.given_memory(args), flags.given_seeds(args)
    replay = given_replay(args)
    ran = traced_policy(args, replay)
    measured = [batch.makespan for batch in replay.run.batches]
    predicted = replay.predict(ran)
    errors = [guess / true - 1 for guess, true in zip(predicted, measured, strict=True)]
    job = _asked_job(args, replay, seeds)
    result: dict[str, Any] = {
        "traced_policy": str(ran),
        "iterations": [batch.iteration for batch in replay.run.batches],
        "measured": measured,
        "predicted": predicted,
        "error": errors,
        "task_overhead": replay.pipeline.task_overhead,
        "hop_latency": replay.network.latency,
    }
    text = show.replay_text(replay, ran, measured, predicted)
    if args.recommend:
        advice, advice_text = _recommend(args, job)
        result["recommended"], text = advice, f"{text}\n{advice_text}"
    else:
        found = _measured(job, _asked_policies(args, job, ran), memory, range(1))
        result["what_if"] = [
            _record(one.policy, one.summary, one.peak_gb)
            | {"makespan_per_iteration": one.summary.makespan / job.pipeline.iterations}
            for one in found
        ]
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    print(text)
    if not args.recommend:
        show.show_candidates(job.pipeline, found, [BASELINE, ran])
    return 0


def _asked_job(args: argparse.Namespace, replay: Replay, seeds: range) -> Job:
    return replay.what_if(
        microbatches=args.microbatches, layers=args.layers, split=args.split, seed=seeds[0]
    )


def _asked_policies(args: argparse.Namespace, job: Job, ran: Policy) -> list[Policy]:
    """The policy that the flags name, or else all hints at the usual limits."""
    if args.hint or args.live_limit or args.pipedream_2bw:
        asked = flags.given_policy(args)
        asked.check(job.pipeline)
        asked.check_limit(job.pipeline)
        return list(dict.fromkeys([BASELINE, ran, asked]))
    every = candidates(job.pipeline.stages, searched_hints(), ["p", "1.5p", "2p"], with_2bw=True)
    return list(dict.fromkeys([BASELINE, ran, *every]))


def _recommend(args: argparse.Namespace, job: Job) -> tuple[dict[str, Any], str]:
    """The flags to use, for a program and for a reader."""
    memory, seeds = flags.given_memory(args), flags.given_seeds(args)
    pipeline = job.pipeline
    if args.memory_gb is None:
        raise UsageError("--recommend needs --memory-gb, what a stage may take")
    limits = searched_limits(pipeline.stages, memory, args.memory_gb)
    policies = candidates(pipeline.stages, searched_hints(), limits, with_2bw=args.pipedream_2bw)
    found = _measured(job, policies, memory, seeds)
    best = recommend(found, args.memory_gb)
    record = _record(best.policy, best.summary, best.peak_gb) | {"flags": best.flags}
    return record, show.advice_text(best, len(found))


def _measured(job: Job, policies: list[Policy], memory: Memory, seeds: range) -> list[Candidate]:
    with ProgressLine("simulate", None, "tasks") as progress:
        return measure(
            job,
            policies,
            memory,
            seeds,
            lambda done, total: progress.update(done, total=total),
        )


def _record(policy: Policy, summary: Summary, peak_gb: float) -> dict[str, Any]:
    """A result for a program."""
    record: dict[str, Any] = {"policy": str(policy), **asdict(summary)}
    if peak_gb:
        record["peak_gb"] = peak_gb
    return record
