"""The pipeline's part in Megatron's training loop: this process's executor, its delays and metrics.

Made from Megatron's arguments when they are first needed, and there until the process ends.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_ext import arguments, cpu, wandb_run
from megatron_ext.errors import UsageError
from megatron_ext.pipeline.jitter import DeviceStopwatch, HostStopwatch, Jitter
from megatron_ext.pipeline.run_facts import RunFacts, without_secrets

if TYPE_CHECKING:
    from megatron_ext.pipeline.metrics import Metrics
    from megatron_ext.pipeline.stage import StageExecutor

_executor: StageExecutor | None = None
_metrics: Metrics | None = None
_summary: wandb_run.PipelineSummary | None = None
_described = False
_jitter: Jitter | None = None


def stage_executor(schedule_pg_collection: Any = None, **_: Any) -> StageExecutor:
    """The process's executor, made when the first batch is near."""
    if schedule_pg_collection is not None:
        raise UsageError(
            "--pipeline-schedule rrfp does not support multi-module pipelines yet; "
            "use --pipeline-schedule megatron"
        )
    global _executor
    if _executor is None:
        _executor = _make_executor()
    return _executor


def current() -> StageExecutor | None:
    """The process's executor if it has been made."""
    return _executor


def _make_executor() -> StageExecutor:
    from megatron.core import parallel_state
    from megatron.training import get_args

    from megatron_ext.pipedream_2bw import megatron_loop as two_versions_loop
    from megatron_ext.pipeline.stage import StageExecutor

    args = get_args()
    config = arguments.rrfp_config(args)
    assert config is not None
    seed = args.seed
    if args.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    return StageExecutor(
        config,
        seed=seed,
        iteration=lambda: int(args.curr_iteration),
        jitter=jitter_of_this_stage if args.rrfp_jitter else lambda: None,
        delayed=two_versions_loop.current,
        facts=_facts(args),
    )


def _facts(args: Any) -> RunFacts:
    """What traces say of the run."""
    settings = {
        "iterations": args.train_iters,
        "recomputation": getattr(args, "recompute_granularity", None),
    }
    if two_versions := arguments.pipedream_2bw_config(args):
        settings |= {f"2BW {name.replace('_', ' ')}": v for name, v in asdict(two_versions).items()}
    return RunFacts(without_secrets(sys.argv), settings)


def jitter_of_this_stage() -> Jitter:
    """What delays its forwards and backwards (--rrfp-jitter)."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    global _jitter
    if _jitter is None:
        args = get_args()
        config = arguments.jitter_config(args)
        assert config is not None
        _jitter = Jitter(
            config,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            replica=parallel_state.get_data_parallel_rank(),
            iteration=lambda: int(getattr(args, "curr_iteration", 0)),
            stopwatch=HostStopwatch() if cpu.enabled() else DeviceStopwatch(),
        )
    return _jitter


def _wandb() -> Any:
    """The wandb module where Megatron writes to it: on the last rank; else None."""
    from megatron.training.global_vars import get_wandb_writer

    return get_wandb_writer()


def describe_to_wandb() -> None:
    """Put our settings and tags into the run, once."""
    from megatron.training import get_args

    global _described
    if not _described and (wandb := _wandb()) is not None:
        wandb_run.describe(wandb.run, get_args())
        _described = True


def log_metrics(iteration: int) -> None:
    """Count the batch that has just run; at the end of a log interval, log what it cost."""
    from megatron.training import get_args
    from megatron.training.global_vars import get_tensorboard_writer

    from megatron_ext.pipeline.metrics import Metrics

    global _metrics, _summary
    if _executor is None or _executor.statistics is None:
        return
    if _metrics is None:
        _metrics = Metrics(_executor.pipeline, timeout_s=_executor.config.timeout_s)
    _metrics.add(_executor.statistics)
    if iteration % get_args().log_interval:
        return
    figures = _metrics.gather()
    tensorboard, wandb = get_tensorboard_writer(), _wandb()
    if tensorboard is not None:
        for name, value in figures.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None and figures:
        describe_to_wandb()  # a patched Megatron has not been through the hooks on arguments
        wandb.log(figures, iteration)
        if _summary is None:
            _summary = wandb_run.PipelineSummary(wandb.run.summary)
        _summary.take(figures, _metrics.batches)


def batch_under_way() -> bool:
    """Whether a batch has begun that no call has ended (--pipedream-2bw)."""
    return _executor is not None and _executor.under_way


def explain(error: BaseException) -> str:
    """One line on an error that ended the run, with the stage's place in the pipeline if known."""
    if _executor is not None and _executor.connected:
        return _executor.explain(error)
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {reason}"
