"""The flags of ``megatron-ext simulate``, and what they describe."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from megatron_ext.errors import UsageError
from megatron_ext.simulate.durations_file import read_durations
from megatron_ext.simulate.jitter_law import JitterLaw
from megatron_ext.simulate.job import Job, Memory
from megatron_ext.simulate.network import Network
from megatron_ext.simulate.pipeline import Clipping, Pipeline, Policy
from megatron_ext.simulate.task_times import MeanTimes


def numbers(text: str) -> list[float]:
    """Times separated by commas."""
    return [float(word) for word in text.split(",")]


def counts(text: str) -> list[int]:
    """Whole numbers separated by commas."""
    return [int(word) for word in text.split(",")]


numbers.__name__, counts.__name__ = (
    "list of numbers",
    "list of whole numbers",
)  # in argparse's words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    _add_job(parser.add_argument_group("the pipeline"))
    _add_times(parser.add_argument_group("times, in any one unit (a millisecond for --trace)"))
    _add_policy(parser.add_argument_group("the schedule"))
    _add_memory(parser.add_argument_group("memory of a stage"))
    _add_modes(parser.add_argument_group("what to do"))


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--stages", type=int, default=None, metavar="P", help="pipeline depth")
    group.add_argument("--microbatches", type=int, default=None, metavar="M", help="per batch")
    group.add_argument("--chunks", type=int, default=1, help="virtual stages per stage")
    group.add_argument("--iterations", type=int, default=1, help="batches, one after the other")
    group.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share every task")
    group.add_argument("--replicas", type=int, default=1, help="data-parallel pipelines")
    group.add_argument("--ranks-per-node", type=int, default=8, help="for times within a node")
    group.add_argument(
        "--layers",
        type=counts,
        default=[],
        metavar="N[,N...]",
        help="of the model, or of each virtual stage; stage times are in proportion",
    )


def _add_times(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--forward",
        type=numbers,
        default=[1.0],
        metavar="T[,T...]",
        help="mean time of a forward, one for all or one per stage (default 1)",
    )
    group.add_argument(
        "--backward", type=numbers, default=[2.0], metavar="T[,T...]", help="the same (default 2)"
    )
    group.add_argument(
        "--weight-share",
        type=float,
        default=0.5,
        help="part of a backward that is weight gradients, for hints that split (default 0.5)",
    )
    group.add_argument(
        "--durations",
        type=Path,
        metavar="FILE",
        help="explicit times instead: JSON with F, B, W as [stage][microbatch]",
    )
    group.add_argument(
        "--jitter",
        default="none",
        metavar="LAW[+LAW...]",
        help="lognormal:SIGMA, pareto:ALPHA, lengths:SIGMA, slow-nodes:FRACTION,FACTOR, "
        "slow-links:FRACTION,FACTOR, paper:P,BASE_MS,ALPHA or J1 to J3 (RRFP, Table 6)",
    )
    group.add_argument("--hop-latency", type=float, default=None, metavar="T", help="of a message")
    group.add_argument(
        "--hop-latency-inside", type=float, default=None, metavar="T", help="within a node"
    )
    group.add_argument("--message-size", type=float, default=0.0, metavar="S", help="in any unit")
    group.add_argument(
        "--bandwidth", type=float, default=math.inf, metavar="S/T", help="of a link between nodes"
    )
    group.add_argument(
        "--bandwidth-inside", type=float, default=None, metavar="S/T", help="within a node"
    )
    group.add_argument(
        "--blocking-messages",
        action="store_true",
        help="a stage that sends waits until the message has arrived",
    )
    group.add_argument("--update", type=float, default=0.0, metavar="T", help="optimizer step")
    group.add_argument(
        "--reduction", type=float, default=0.0, metavar="T", help="gradient sum over replicas"
    )
    group.add_argument(
        "--norm-latency", type=float, default=0.0, metavar="T", help="gradient norm over stages"
    )
    group.add_argument(
        "--task-overhead", type=float, default=None, metavar="T", help="per task, not computing"
    )
    group.add_argument(
        "--agreement", type=float, default=0.0, metavar="T", help="per task, if tensor parallel"
    )
    group.add_argument("--seed", type=int, default=0, help="of the first draw (default 0)")
    group.add_argument("--seeds", type=int, default=1, help="draws to average over (default 1)")


def _add_policy(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--hint", default=None, help="as --rrfp-hint, or gpipe (default bfw-pieces)")
    group.add_argument("--live-limit", default=None, help="as --rrfp-live-limit, such as 1.5p")
    group.add_argument("--pipedream-2bw", action="store_true", help="no flush between batches")
    group.add_argument(
        "--pipedream-2bw-clip",
        choices=[str(clipping) for clipping in Clipping],
        default=str(Clipping.EXACT),
        help="what an update waits for: the norm over all stages, the stage's, nothing",
    )


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--live-gb", type=float, default=0.0, help="of one live microbatch")
    group.add_argument("--weights-gb", type=float, default=0.0, help="of a version of the weights")
    group.add_argument("--other-gb", type=float, default=0.0, help="everything else")


def _add_modes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--from-trace",
        type=Path,
        metavar="DIR",
        help="take times from the traces of a short run; ask with the flags above",
    )
    group.add_argument("--traced-hint", metavar="HINT", help="of that run (else it is guessed)")
    group.add_argument("--traced-limit", metavar="LIMIT", help="of that run (else it is guessed)")
    group.add_argument(
        "--split",
        type=counts,
        default=[],
        metavar="N,N[,N...]",
        help="with --from-trace: layers of each virtual stage instead of --layers",
    )
    group.add_argument(
        "--recommend", action="store_true", help="search for the fastest flags within --memory-gb"
    )
    group.add_argument("--memory-gb", type=float, metavar="X", help="what a stage may take")
    group.add_argument(
        "--preset",
        nargs="?",
        const="paper",
        choices=["paper", "table1", "table2", "table3", "table6", "table7", "table8"],
        help="the settings of RRFP's evaluation, its tables beside simulated ones",
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument("--no-baseline", action="store_true", help="do not run 1F1B to compare with")
    group.add_argument(
        "--trace", type=Path, metavar="DIR", help="write traces of the first draw, as --rrfp-trace"
    )


def given_job(args: argparse.Namespace) -> Job:
    """The job that the flags describe.

    Raises:
        UsageError: One of them is out of range.
    """
    law = JitterLaw.parse(args.jitter)
    network = given_network(args)
    if args.durations is not None:
        for flag in ("stages", "microbatches"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag} and --durations: the file says it; leave --{flag} out")
        for flag, value in (("replicas", 1), ("iterations", 1), ("tensor_parallel", 1)):
            if getattr(args, flag) != value:
                raise UsageError(
                    f"--{flag.replace('_', '-')} and --durations: the file holds one batch of one "
                    "pipeline"
                )
        if args.chunks < 1:
            raise UsageError(f"--chunks {args.chunks}: it must be at least 1")
        times = read_durations(args.durations, args.chunks, args.weight_share)
        virtual, microbatches = times.forward.shape
        pipeline = given_pipeline(args, virtual // args.chunks, microbatches)
        return Job(pipeline, None, law, network, times)
    pipeline = given_pipeline(args, _or(args.stages, 8), _or(args.microbatches, 64))
    means = MeanTimes.of(pipeline, args.forward, args.backward, args.weight_share, args.layers)
    return Job(pipeline, means, law, network)


def given_network(args: argparse.Namespace) -> Network:
    """The network that the flags describe.

    Raises:
        UsageError: One of them is out of range.
    """
    return Network(
        latency=args.hop_latency or 0.0,
        latency_inside=args.hop_latency_inside,
        message_size=args.message_size,
        bandwidth=args.bandwidth,
        bandwidth_inside=args.bandwidth_inside,
        ranks_per_node=args.ranks_per_node,
        blocking=args.blocking_messages,
    )


def given_pipeline(args: argparse.Namespace, stages: int, microbatches: int) -> Pipeline:
    """The pipeline that the flags describe.

    Raises:
        UsageError: One of them is out of range.
    """
    return Pipeline(
        stages=stages,
        microbatches=microbatches,
        chunks=args.chunks,
        iterations=args.iterations,
        tensor_parallel=args.tensor_parallel,
        replicas=args.replicas,
        update=args.update,
        reduction=args.reduction,
        norm_latency=args.norm_latency,
        task_overhead=args.task_overhead or 0.0,
        agreement=args.agreement,
    )


def given_policy(args: argparse.Namespace) -> Policy:
    """The policy that the flags describe."""
    policy = Policy(
        live_limit=args.live_limit,
        pipedream_2bw=args.pipedream_2bw,
        clipping=Clipping(args.pipedream_2bw_clip),
    )
    return replace(policy, hint=args.hint) if args.hint else policy


def given_memory(args: argparse.Namespace) -> Memory:
    """The memory that the flags describe.

    Raises:
        UsageError: One of them is out of range.
    """
    for flag in ("live_gb", "weights_gb", "other_gb"):
        value = getattr(args, flag)
        if not 0 <= value < math.inf:
            raise UsageError(f"--{flag.replace('_', '-')} {value:g}: it is finite, not negative")
    return Memory(args.live_gb, args.weights_gb, args.other_gb)


def given_seeds(args: argparse.Namespace) -> range:
    """The seeds that the flags describe.

    Raises:
        UsageError: There are none, or one is negative.
    """
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed}: it must not be negative")
    if args.seeds < 1:
        raise UsageError(f"--seeds {args.seeds}: it must be at least 1")
    return range(args.seed, args.seed + args.seeds)


def _or(given: int | None, default: int) -> int:
    """What was given, 0 included."""
    return default if given is None else given


def check_modes(args: argparse.Namespace) -> None:
    """Refuse flags that ask for two things at once, or for one that needs another.

    Raises:
        UsageError: They do.
    """
    if args.from_trace is not None:
        for flag in ("durations", "trace", "preset"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag} and --from-trace do not go together")
        if args.jitter != "none":
            raise UsageError("--jitter and --from-trace: the trace has its own; leave it out")
    else:
        for flag in ("traced_hint", "traced_limit"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} needs --from-trace DIR")
        if args.split:
            raise UsageError("--split needs --from-trace DIR; else give --layers")
    if args.memory_gb is not None and not args.recommend:
        raise UsageError("--memory-gb needs --recommend")
