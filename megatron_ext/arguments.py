"""Every flag of megatron_ext: one dataclass and one argparse group per capability.

Pure configuration: this file reads Megatron's parsed arguments but imports no Megatron.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.hints import HINTS, find_hint
from megatron_ext.pipeline.jitter import JitterConfig
from megatron_ext.pipeline.live_limit import parse_live_limit
from megatron_ext.pipeline.trace_window import TraceWindow


@dataclass(frozen=True, kw_only=True)
class RrfpConfig:
    """The readiness-driven pipeline (RRFP)."""

    hint: str = "bfw-pieces"
    """The order among ready tasks: a key of `HINTS`, or ``module:Name``."""
    live_limit: str | None = None
    """Most microbatches a stage holds: a number, or a multiple of the pipeline's depth; None is
    the hint's own."""
    transport: str = "auto"
    """How messages travel."""
    timeout_s: float = 600.0
    """Seconds without any progress after which the run is ended."""
    trace: TraceWindow | None = None
    """Where to write traces, and of which iterations."""


@dataclass(frozen=True, kw_only=True)
class Pipedream2bwConfig:
    """Two weight versions (PipeDream-2BW): the pipeline does not drain between batches."""

    clip: str = "exact"
    """Whose gradient norm clips: exact is all stages' as without 2BW, stage its own, off none."""
    error_feedback: float = 1.0
    """Coefficient of the correction of each update by the one before; 0 is none."""
    start_iteration: int = 0
    """The first iteration, from 0, that is delayed; those before are flushed."""
    end_iteration: int | None = None
    """The first iteration that is not delayed any more."""


CLIPS = ("exact", "stage", "off")


@dataclass(frozen=True, kw_only=True)
class CollapseConfig:
    """The watch over the loss (collapse)."""

    references: tuple[str, ...]
    """Curve files of finished runs."""
    window: tuple[float, float] = (0.25, 0.5)
    """Fractions of training from which on to align, and at which that is settled."""
    align: str = "early"
    """early: by the window. expected: to a given final loss. power-law: to one from the references'
    sizes and final losses."""
    false_alarm_rate: float = 0.01
    """Accepted chance of a false alarm in a healthy run."""
    action: str = "log"
    """What an alarm does; each one also does what those before it do: log, alert, checkpoint,
    stop."""
    expected_final_loss: float | None = None
    """Nats per token."""
    force: bool = False
    """Compare although the controls differ."""


COLLAPSE_ACTIONS = ("log", "alert", "checkpoint", "stop")
COLLAPSE_EXIT_CODE = 86
"""Exit status of a run that an alarm has stopped."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all flags of megatron_ext to Megatron's parser."""
    group = parser.add_argument_group("megatron_ext: readiness-driven pipeline (RRFP)")
    group.add_argument(
        "--pipeline-schedule",
        choices=["megatron", "rrfp"],
        default="megatron",
        help="megatron: Megatron's own fixed order. rrfp: every stage runs what is ready.",
    )
    group.add_argument(
        "--rrfp-hint",
        metavar="HINT",
        help=f"Order among ready tasks: {', '.join(HINTS)}, or your own as module:Name. "
        "(default: bfw-pieces with --transformer-impl local, else bf)",
    )
    group.add_argument(
        "--rrfp-live-limit",
        metavar="LIMIT",
        default=RrfpConfig.live_limit,
        help="Most microbatches a stage may hold: a number such as 12, or a multiple of the "
        "pipeline's depth such as p or 1.5p. 1F1B's own peak is p. (default: p for 1f1b and "
        "hints that split weight gradients off, 2p for the others)",
    )
    group.add_argument(
        "--rrfp-transport",
        choices=["auto", "gloo", "nixl", "nccl"],
        default=RrfpConfig.transport,
        help="How messages travel between stages. auto: on a GPU nixl where it is installed and "
        "nccl where not, on CPU gloo. (default: %(default)s)",
    )
    group.add_argument(
        "--rrfp-timeout",
        metavar="SECONDS",
        type=float,
        default=RrfpConfig.timeout_s,
        help="End the run after this long without any progress. (default: %(default)s)",
    )
    group.add_argument(
        "--rrfp-trace",
        metavar="DIR[:FIRST-LAST]",
        help="Write a Chrome trace per rank into DIR, of all iterations or of FIRST to LAST; join "
        "and look at them with: megatron-ext report DIR --trace FILE",
    )
    group.add_argument(
        "--rrfp-jitter",
        metavar="P,BASE_MS,ALPHA[,SEED]",
        help="Delay forwards and backwards at random, for experiments, with either schedule: with "
        "probability P by ALPHA * max(BASE_MS, average time of such a task) * (0.5 to 1.5). The "
        "same tasks are delayed whatever the schedule; the results do not change.",
    )
    group = parser.add_argument_group("megatron_ext: two weight versions (PipeDream-2BW)")
    group.add_argument(
        "--pipedream-2bw",
        action="store_true",
        help="Do not drain the pipeline between iterations: gradients are exactly one step old. "
        "Needs --pipeline-schedule rrfp. Use it with --optimizer muon.",
    )
    group.add_argument(
        "--pipedream-2bw-clip",
        choices=CLIPS,
        default=Pipedream2bwConfig.clip,
        help="How --clip-grad works. exact: by the norm over all stages, as without 2BW, with a "
        "second gradient buffer. stage: by each stage's own norm. off: not. "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--pipedream-2bw-error-feedback",
        metavar="LAMBDA",
        type=float,
        default=Pipedream2bwConfig.error_feedback,
        help="After each update u_k also subtract LAMBDA * (u_k - u_{k-1}), which repairs most of "
        "what the delay costs. 0 turns it off. (default: %(default)s)",
    )
    group.add_argument(
        "--pipedream-2bw-start-iteration",
        metavar="N",
        default="0",
        help="Run the first N iterations, or this fraction of the run (0.1), flushed and "
        "undelayed. (default: %(default)s)",
    )
    group.add_argument(
        "--pipedream-2bw-end-iteration",
        metavar="N",
        help="Run the iterations after the first N, or after this fraction of the run, flushed "
        "and undelayed again. (default: none)",
    )
    group = parser.add_argument_group("megatron_ext: watch over the loss (collapse)")
    group.add_argument(
        "--collapse-reference",
        nargs="+",
        metavar="FILE",
        help="Compare the normalised loss with these curve files, of megatron-ext collapse fit; of "
        "several the first whose controls match.",
    )
    group.add_argument(
        "--collapse-window",
        metavar="START-END",
        default="0.25-0.5",
        help="Part of training to align on; it grows as the run goes on. (default: %(default)s)",
    )
    group.add_argument(
        "--collapse-align",
        choices=["early", "expected", "power-law"],
        help="early: by the window. expected: to --collapse-expected-final-loss. power-law: to one "
        "from the sizes and final losses of the references. (default: early, or expected where "
        "that is given)",
    )
    group.add_argument(
        "--collapse-false-alarm-rate",
        metavar="RATE",
        type=float,
        default=CollapseConfig.false_alarm_rate,
        help="Accepted chance of a false alarm in a healthy run. (default: %(default)s)",
    )
    group.add_argument(
        "--collapse-action",
        choices=COLLAPSE_ACTIONS,
        default=CollapseConfig.action,
        help="What an alarm does: log it; alert: also through wandb; checkpoint: also save one; "
        f"stop: also end the run with exit status {COLLAPSE_EXIT_CODE}. (default: %(default)s)",
    )
    group.add_argument(
        "--collapse-expected-final-loss",
        metavar="LOSS",
        type=float,
        help="Align to this final loss, nats per token.",
    )
    group.add_argument(
        "--collapse-force",
        action="store_true",
        help="Compare although schedule, tokens per parameter or tau differ.",
    )
    group = parser.add_argument_group("megatron_ext: general")
    group.add_argument(
        "--allow-untested-megatron",
        action="store_true",
        help="Run with a Megatron outside the range that this megatron_ext is tested with.",
    )
    return parser


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Make ``--help`` work: Megatron has help texts with a bare %, at which argparse fails."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")


def complete(args: argparse.Namespace, command_line: Sequence[str]) -> None:
    """Give `args` our flags where Megatron built it from a file instead of the command line."""
    if hasattr(args, "pipeline_schedule"):
        return
    ours, _ = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args(
        command_line
    )
    for name, value in vars(ours).items():
        setattr(args, name, value)


def rrfp_config(args: argparse.Namespace) -> RrfpConfig | None:
    """The pipeline's settings, or None where Megatron's own schedule is to run.

    Args:
        args: Megatron's validated arguments with our flags in them.

    Raises:
        UsageError: The settings cannot work with each other or with Megatron's.
    """
    if args.pipeline_schedule == "megatron":
        if args.rrfp_trace:
            raise UsageError(
                "--rrfp-trace traces the readiness-driven pipeline only: "
                "add --pipeline-schedule rrfp, or leave it out"
            )
        return None
    depth = args.pipeline_model_parallel_size
    if depth < 2 and not args.pipedream_2bw:
        raise UsageError(
            "--pipeline-schedule rrfp needs a pipeline: "
            f"--pipeline-model-parallel-size is {depth}, the least is 2"
        )
    name = args.rrfp_hint
    if name is None:
        # Splitting layers of Transformer Engine has to be asked for: it has not run on a GPU yet.
        is_local = getattr(args, "transformer_impl", "local") == "local"
        name = RrfpConfig.hint if is_local else "bf"
    try:
        hint = find_hint(name)
    except ValueError as error:
        raise UsageError(f"--rrfp-hint: {error}") from None
    try:
        parse_live_limit(args.rrfp_live_limit or hint.live_limit, depth)
    except ValueError as error:
        raise UsageError(f"--rrfp-live-limit: {error}") from None
    if not args.rrfp_timeout > 0:
        raise UsageError(f"--rrfp-timeout {args.rrfp_timeout} is not a positive time")
    _refuse(
        args,
        "--pipeline-schedule rrfp",
        _UNSUPPORTED,
        "leave it out, or use --pipeline-schedule megatron",
    )
    return RrfpConfig(
        hint=name,
        live_limit=args.rrfp_live_limit,
        transport=args.rrfp_transport,
        timeout_s=args.rrfp_timeout,
        trace=_parsed("--rrfp-trace", args.rrfp_trace, TraceWindow.parse),
    )


def pipedream_2bw_config(args: argparse.Namespace) -> Pipedream2bwConfig | None:
    """When and how training is delayed by a step, or None.

    Args:
        args: Megatron's validated arguments with our flags in them.

    Raises:
        UsageError: The settings cannot work with each other or with Megatron's.
    """
    if not args.pipedream_2bw:
        for name, default in (("clip", Pipedream2bwConfig.clip), ("end_iteration", None)):
            if getattr(args, f"pipedream_2bw_{name}") != default:
                flag = f"--pipedream-2bw-{name.replace('_', '-')}"
                raise UsageError(f"{flag} does nothing without --pipedream-2bw")
        return None
    if args.pipeline_schedule != "rrfp":
        raise UsageError("--pipedream-2bw needs --pipeline-schedule rrfp")
    if args.rrfp_hint is not None and find_hint(args.rrfp_hint).fixed_order:
        raise UsageError(
            f"--pipedream-2bw does not go with --rrfp-hint {args.rrfp_hint}: a fixed order ends "
            "with its batch; use bfw"
        )
    _refuse(args, "--pipedream-2bw", _WITHOUT_SECOND_VERSION, "leave one of the two out")
    clip, feedback = args.pipedream_2bw_clip, args.pipedream_2bw_error_feedback
    if clip != "exact" and args.fp16:
        raise UsageError(
            f"--pipedream-2bw-clip {clip} does not go with --fp16: an overflow on one stage must "
            "skip the update on all; use exact"
        )
    if not (math.isfinite(feedback) and feedback >= 0):
        raise UsageError(f"--pipedream-2bw-error-feedback {feedback} is no coefficient")
    start = _iteration(args, "start", args.pipedream_2bw_start_iteration)
    end = _iteration(args, "end", args.pipedream_2bw_end_iteration)
    if end is not None and end <= (start or 0):
        raise UsageError(
            f"--pipedream-2bw-end-iteration {end} is not after --pipedream-2bw-start-iteration "
            f"{start}"
        )
    return Pipedream2bwConfig(
        clip=clip, error_feedback=feedback, start_iteration=start or 0, end_iteration=end
    )


def _iteration(args: argparse.Namespace, which: str, text: str | None) -> int | None:
    """An iteration given as a number or, with a point, as a fraction of the run."""
    if text is None:
        return None
    flag = f"--pipedream-2bw-{which}-iteration"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0 or not math.isfinite(value):
        raise UsageError(f"{flag} {text} is neither an iteration nor a fraction of the run")
    if "." not in str(text):
        return int(value)
    if value > 1 or not args.train_iters:
        raise UsageError(f"{flag} {text} is a fraction of --train-iters, from 0.0 to 1.0")
    return round(value * int(args.train_iters))


def collapse_config(args: argparse.Namespace) -> CollapseConfig | None:
    """The watch over the loss, or None.

    Raises:
        UsageError: A flag is malformed, or they do not fit together.
    """
    references = getattr(args, "collapse_reference", None)
    if not references:
        for flag in ("collapse_align", "collapse_expected_final_loss"):
            if getattr(args, flag, None) is not None:
                name = f"--{flag.replace('_', '-')}"
                raise UsageError(f"{name} needs --collapse-reference FILE")
        return None
    rate, expected = args.collapse_false_alarm_rate, args.collapse_expected_final_loss
    if not 0 < rate < 1:
        raise UsageError(f"--collapse-false-alarm-rate {rate} is not between 0 and 1")
    if expected is not None and not 0 < expected < math.inf:
        raise UsageError(f"--collapse-expected-final-loss {expected} is not a positive number")
    align = args.collapse_align or ("early" if expected is None else "expected")
    if (align == "expected") != (expected is not None):
        raise UsageError(
            "--collapse-align expected and --collapse-expected-final-loss go together: "
            "give both or neither"
        )
    if align == "power-law" and len(references) < 2:
        raise UsageError("--collapse-align power-law needs two or more --collapse-reference files")
    return CollapseConfig(
        references=tuple(references),
        window=_parsed("--collapse-window", args.collapse_window, _window) or CollapseConfig.window,
        align=align,
        false_alarm_rate=rate,
        action=args.collapse_action,
        expected_final_loss=expected,
        force=args.collapse_force,
    )


def _window(text: str) -> tuple[float, float]:
    start, _, end = text.partition("-")
    with contextlib.suppress(ValueError):
        window = float(start), float(end)
        if 0 <= window[0] < window[1] <= 1:
            return window
    raise ValueError(f"{text!r} is not START-END with 0 <= START < END <= 1")


def jitter_config(args: argparse.Namespace) -> JitterConfig | None:
    """The delays to inject, with either schedule, or None.

    Raises:
        UsageError: The flag is malformed, or another flag leaves nothing to delay.
    """
    config = _parsed("--rrfp-jitter", args.rrfp_jitter, JitterConfig.parse)
    if config is not None:
        _refuse(args, "--rrfp-jitter", _WITHOUT_STEPS, "leave one of the two out")
    return config


def describe(config: RrfpConfig | Pipedream2bwConfig) -> str:
    """The settings in one line for the log."""
    if isinstance(config, RrfpConfig):
        config = replace(config, live_limit=config.live_limit or find_hint(config.hint).live_limit)
    values = ((field.name, getattr(config, field.name)) for field in fields(config))
    return ", ".join(f"{name} {value}" for name, value in values if value is not None)


def _parsed[T](flag: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    """What a flag was given, parsed; None where it was not."""
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def _refuse(
    args: argparse.Namespace, ours: str, unsupported: Sequence[_Unsupported], advice: str
) -> None:
    """Raise if a flag of Megatron is set that one of ours cannot work with."""
    for name, flag, is_unsupported in unsupported:
        value = getattr(args, name, None)
        if is_unsupported(value):
            raise UsageError(f"{ours} does not support {flag} yet (it is {value}); {advice}")


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _given(value: Any) -> bool:
    return value is not None


def _names_an_implementation(value: Any) -> bool:
    return value not in (None, "none")


# (Megatron's attribute, its flag, whether a value of it is unsupported)
type _Unsupported = tuple[str, str, Callable[[Any], bool]]

# Where Megatron does not compute through its forward and backward steps.
_WITHOUT_STEPS: tuple[_Unsupported, ...] = (
    ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", bool),
    ("hybrid_context_parallel", "--hybrid-context-parallel", bool),
    ("cuda_graph_impl", "--cuda-graph-impl", _names_an_implementation),
)
# What changes weights or gradients past the two versions of them.
_WITHOUT_SECOND_VERSION: tuple[_Unsupported, ...] = (
    ("overlap_param_gather", "--overlap-param-gather", bool),
    ("iterations_to_skip", "--iterations-to-skip", bool),
    ("rerun_mode", "--rerun-mode", lambda value: value == "report_determinism_stats"),
    ("qk_clip", "--qk-clip", bool),
    ("fp8", "--fp8-format", _given),
    ("fp4", "--fp4-format", _given),
    ("optimizer_cpu_offload", "--optimizer-cpu-offload", bool),
    ("use_precision_aware_optimizer", "--use-precision-aware-optimizer", bool),
    (
        "num_distributed_optimizer_instances",
        "--num-distributed-optimizer-instances",
        _more_than_one,
    ),
    ("moe_router_enable_expert_bias", "--moe-router-enable-expert-bias", bool),
    ("vision_pretraining", "--vision-pretraining", bool),
)
_UNSUPPORTED: tuple[_Unsupported, ...] = (
    ("gtp_weight_remat_size", "--generalized-tensor-parallel-remat-size", _more_than_one),
    ("hybrid_context_parallel", "--hybrid-context-parallel", bool),
    ("mtp_num_layers", "--mtp-num-layers", _given),
    ("cuda_graph_impl", "--cuda-graph-impl", _names_an_implementation),
    ("enable_cuda_graph", "--enable-cuda-graph", bool),
    ("external_cuda_graph", "--external-cuda-graph", bool),
    # It sums over data-parallel replicas within a forward, and these run in orders of their own.
    (
        "moe_router_load_balancing_type",
        "--moe-router-load-balancing-type global_aux_loss",
        lambda value: "global_aux_loss" in (value if isinstance(value, list) else [value]),
    ),
    ("moe_paged_stash", "--moe-paged-stash", bool),
    ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", bool),
    ("delay_wgrad_compute", "--delay-wgrad-compute", bool),
    ("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute", bool),
    ("fine_grained_activation_offloading", "--fine-grained-activation-offloading", bool),
    ("use_megatron_fsdp", "--use-megatron-fsdp", bool),
    ("use_torch_fsdp2", "--use-torch-fsdp2", bool),
    ("te_rng_tracker", "--te-rng-tracker", bool),
    ("inference_rng_tracker", "--inference-rng-tracker", bool),
    ("perform_rl_step", "--perform-rl-step", bool),
)
