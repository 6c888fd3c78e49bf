"""What the flags say of a traced run."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_ext.errors import UsageError
from megatron_ext.simulate.flags import given_network, given_pipeline
from megatron_ext.simulate.pipeline import Policy
from megatron_ext.simulate.replay import Replay
from megatron_ext.simulate.traced_run import read_traces


def given_replay(args: argparse.Namespace) -> Replay:
    """The run in --from-trace; its shape and times are measured, unless flags overrule them.

    Raises:
        UsageError: The traces cannot be used, or a flag contradicts them.
    """
    run = read_traces(args.from_trace)
    if args.stages not in (None, run.stages):
        raise UsageError(f"--stages {args.stages}: the traced run has {run.stages}; leave it out")
    if not 0 <= args.weight_share <= 1:
        raise UsageError(f"--weight-share {args.weight_share:g} is not between 0 and 1")
    pipeline = replace(
        given_pipeline(args, run.stages, run.microbatches),
        chunks=run.chunks,
        replicas=run.replicas,
        iterations=1,
    )
    network = given_network(args)
    if args.task_overhead is None:
        pipeline = replace(pipeline, task_overhead=run.task_overhead)
    if run.continuous:
        pipeline = replace(
            pipeline,
            update=args.update or run.update,
            norm_latency=args.norm_latency or run.norm_latency,
            reduction=args.reduction or run.reduction,
        )
    if args.hop_latency is None:
        network = replace(network, latency=run.hop_latency)
    return Replay(run, pipeline, network, args.weight_share)


def traced_policy(args: argparse.Namespace, replay: Replay) -> Policy:
    """What the traced run ran under: as flags or traces say, or what explains its order best.

    Raises:
        UsageError: The flags contradict the trace.
    """
    if args.traced_hint is None:
        policy = replay.known_policy() or replay.likely_policy()
        return replace(policy, live_limit=args.traced_limit or policy.live_limit)
    policy = Policy(args.traced_hint, args.traced_limit, replay.run.continuous)
    policy.check(replay.pipeline)
    if policy.hint_class.splits_weight != replay.run.splits_weight:
        does = "has" if replay.run.splits_weight else "has no"
        raise UsageError(
            f"--traced-hint {args.traced_hint}: the trace {does} weight-gradient tasks; "
            "it is of another hint"
        )
    if replay.run.splits_weight and policy.hint_class.weight_pieces != replay.run.weight_pieces:
        raise UsageError(
            f"--traced-hint {args.traced_hint}: the trace has {replay.run.weight_pieces} tasks per "
            f"weight gradient, not {policy.hint_class.weight_pieces}; it is of another hint"
        )
    return policy
