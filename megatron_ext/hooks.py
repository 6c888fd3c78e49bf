"""All that changes in Megatron: a table of what is replaced, by what, since when.

Only the hooks on argument parsing are installed from the start. Once the arguments are known they
go, and the hooks of the capabilities that were asked for come; a run without our flags therefore
runs on Megatron's own objects.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_ext import arguments, cpu, cpu_training, wandb_run
from megatron_ext.hook import Function, Hook, NativePlace, install, uninstall
from megatron_ext.pipeline import megatron_loop as pipeline_loop
from megatron_ext.pipeline import transformer_engine
from megatron_ext.pipeline.hints import find_hint
from megatron_ext.pipeline.jitter import Jitter, jittered_backward_step, jittered_forward_step
from megatron_ext.start_checks import check_data

# What the hooks put in place of Megatron's functions.


def _parse_args(original: Function) -> Function:
    def parse_args(extra_args_provider: Any = None, *rest: Any, **named: Any) -> Any:
        def with_ours(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_arguments(parser)

        args = original(with_ours, *rest, **named)
        complete_arguments(args)
        return args

    return parse_args


def add_arguments(parser: Any) -> Any:
    """Add our flags to Megatron's parser."""
    arguments.mend_help(parser)
    return arguments.add_arguments(parser)


def complete_arguments(args: Any) -> None:
    """Complete parsed arguments that are not validated yet."""
    arguments.complete(args, sys.argv[1:])
    if cpu.enabled():
        changes = cpu.adjust_arguments(args)
        if changes and args.rank == 0:
            print(f"megatron_ext: --cpu sets {' '.join(changes)}", flush=True)


def _set_global_variables(original: Function) -> Function:
    def set_global_variables(args: Any, *rest: Any, **named: Any) -> Any:
        # Every way into Megatron comes by here, once, with arguments parsed and validated.
        configure(args)
        try:
            result = original(args, *rest, **named)
        except Exception as error:
            if (explained := wandb_run.explain(error)) is not None:
                raise explained from None
            raise
        pipeline_loop.describe_to_wandb()
        return result

    return set_global_variables


def configure(args: Any) -> None:
    """Install what validated arguments ask for, and take the hooks on arguments out.

    Raises:
        UsageError: They ask for what cannot work.
    """
    rrfp = arguments.rrfp_config(args)
    two_versions = arguments.pipedream_2bw_config(args)
    jitter = arguments.jitter_config(args)
    collapse = arguments.collapse_config(args)
    wandb_run.check(args)
    if args.rank == 0:  # which reads them in any case; others' disks may lack them
        check_data(args)
    if rrfp is not None:
        _check_transport(rrfp.transport)
    if collapse is not None:
        _check_collapse(collapse, args)
    uninstall(ARGUMENT_HOOKS)
    if rrfp is not None:
        if args.rank == 0:
            print(f"megatron_ext: readiness-driven pipeline: {arguments.describe(rrfp)}")
        install(RRFP_HOOKS)
        if find_hint(rrfp.hint).splits_weight:
            install(WEIGHT_GRADIENT_HOOKS)
            if getattr(args, "transformer_impl", "local") == "transformer_engine":
                transformer_engine.check_can_delay(args, rrfp.hint)
                install(TRANSFORMER_ENGINE_HOOKS)
        if args.tensorboard_dir or args.wandb_project:
            install(METRICS_HOOKS)
    if two_versions is not None:
        from megatron_ext.pipedream_2bw import megatron_loop

        megatron_loop.announce(two_versions, args)
        install((*UPDATE_HOOKS, *PIPEDREAM_2BW_HOOKS))
    if jitter is not None:
        if args.rank == 0:
            print(f"megatron_ext: forwards and backwards are delayed: --rrfp-jitter {jitter}")
        install(JITTER_HOOKS)
    if collapse is not None:
        install(COLLAPSE_HOOKS)


def _check_transport(name: str) -> None:
    from megatron_ext.pipeline.transport.choose import check_transport

    check_transport(name, on_gpu=not cpu.enabled())


def _check_collapse(config: arguments.CollapseConfig, args: Any) -> None:
    from megatron_ext.collapse.megatron_loop import check_usable

    check_usable(config, args)


def _collapse(name: str) -> Callable[[Function], Function]:
    """A replacement that the watch over the loss makes; imported only when it is asked for."""

    def wrap(original: Function) -> Function:
        from megatron_ext.collapse import megatron_loop

        replacement: Function = getattr(megatron_loop, name)(original)
        return replacement

    return wrap


def _get_forward_backward_func(original: Function) -> Function:
    def get_forward_backward_func(*args: Any, **named: Any) -> Function:
        return pipeline_loop.stage_executor(**named)

    return get_forward_backward_func


def _select_schedule(registry: Any) -> Callable[[], None]:
    registry.register("rrfp", pipeline_loop.stage_executor)
    registry.select("rrfp")
    return lambda: registry.select(None)


def _listen(find: Callable[[], dict[str, Function]]) -> NativePlace:
    """Join the callbacks of a patched Megatron with the methods, by event, that `find` gives."""

    def join(callbacks: Any) -> Callable[[], None]:
        listener = SimpleNamespace(**find())
        callbacks.add(listener)
        return lambda: callbacks.remove(listener)

    return NativePlace("megatron.training.callbacks", join)


def _collapse_events(*events: str) -> NativePlace:
    def find() -> dict[str, Function]:
        from megatron_ext.collapse import megatron_loop

        return {event: getattr(megatron_loop, event) for event in events}

    return _listen(find)


def _split_linear(original: Function) -> Function:
    from megatron_ext.pipeline.weight_grad import split_linear

    return split_linear(original)


def _two_versions(name: str) -> Callable[[Function], Function]:
    """A wrapper of `pipedream_2bw.megatron_loop`, imported when its hook is installed."""

    def wrap(original: Function) -> Function:
        module = importlib.import_module("megatron_ext.pipedream_2bw.megatron_loop")
        replacement: Function = getattr(module, name)(original)
        return replacement

    return wrap


def _training_log(original: Function) -> Function:
    signature = inspect.signature(original)

    def training_log(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        pipeline_loop.log_metrics(int(signature.bind(*args, **named).arguments["iteration"]))
        return result

    return training_log


def jitter_hooks(jitter: Callable[[], Jitter | None]) -> tuple[Hook, ...]:
    """Hooks that delay Megatron's forward and backward steps.

    Args:
        jitter: Gives the delays of this stage, at every step; None for none.
    """
    module = "megatron.core.pipeline_parallel.schedules"
    return (
        Hook(
            module,
            "forward_step",
            lambda original: jittered_forward_step(original, jitter),
            "delay forwards",
        ),
        Hook(
            module,
            "backward_step",
            lambda original: jittered_backward_step(original, jitter),
            "delay backwards",
        ),
    )


_OWN_FLAGS = NativePlace("megatron.training.extensions", lambda _: lambda: None)
"""A patched Megatron calls `native` without being asked."""

ARGUMENT_HOOKS = (
    Hook(
        "megatron.training.arguments",
        "parse_args",
        _parse_args,
        "add our flags",
        native=_OWN_FLAGS,
    ),
    Hook(
        "megatron.training.global_vars",
        "set_global_variables",
        _set_global_variables,
        "see the validated flags",
        native=_OWN_FLAGS,
    ),
)
CPU_HOOKS = (
    Hook(
        "megatron.training.initialize",
        "initialize_megatron",
        cpu_training.initialize_megatron,
        "start without CUDA",
    ),
    Hook(
        "megatron.training.checkpointing",
        "load_checkpoint",
        cpu_training.load_checkpoint,
        "go on from a checkpoint of the distributed optimizer with PyTorch's own Adam",
    ),
)
WHEEL_HOOKS = (
    Hook(
        "megatron.core.datasets.utils",
        "compile_helpers",
        cpu_training.compile_helpers,
        "load the dataset helper that the wheel brings, which has no Makefile to compile it",
    ),
)
WEIGHT_GRADIENT_HOOKS = (
    Hook(
        "megatron.core.tensor_parallel.layers",
        "linear_with_grad_accumulation_and_async_allreduce",
        _split_linear,
        "split the backward of linear layers",
    ),
)
TRANSFORMER_ENGINE_HOOKS = (
    Hook(
        "megatron.training.arguments",
        "core_transformer_config_from_args",
        transformer_engine.delaying_config,
        "let layers of Transformer Engine delay their weight gradients",
    ),
    Hook(
        "megatron.training.training",
        "get_model",
        transformer_engine.delaying_model,
        "let data parallelism wait for delayed weight gradients",
    ),
)
RRFP_HOOKS = (
    Hook(
        "megatron.core.pipeline_parallel.schedules",
        "get_forward_backward_func",
        _get_forward_backward_func,
        "run the stage executor instead of a fixed schedule",
        native=NativePlace("megatron.core.pipeline_parallel.schedule_registry", _select_schedule),
    ),
)
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter_tensor",
)
UPDATE_HOOKS = (
    *(
        Hook(
            "torch.distributed.distributed_c10d",
            name,
            _two_versions("yielding_collective"),
            "run tasks while an update waits for other ranks",
        )
        for name in _COLLECTIVES
    ),
    Hook(
        "torch.distributed.distributed_c10d",
        "_coalescing_manager",
        _two_versions("yielding_coalescing"),
        "run tasks while an update waits for other ranks",
    ),
)
PIPEDREAM_2BW_HOOKS = (
    Hook(
        "megatron.training.training",
        "setup_model_and_optimizer",
        _two_versions("keep_two_versions"),
        "keep two versions of the weights and step the optimizer between tasks",
    ),
    Hook(
        "megatron.training.checkpointing",
        "load_checkpoint",
        _two_versions("load_two_versions"),
        "load two versions of the weights",
    ),
    Hook(
        "megatron.training.checkpointing",
        "_load_base_checkpoint",
        _two_versions("read_older_version"),
        "take the older version from a checkpoint",
    ),
    Hook(
        "megatron.training.checkpointing",
        "generate_state_dict",
        _two_versions("add_older_version"),
        "save two versions of the weights",
    ),
    *(
        Hook(
            "megatron.training.utils",
            name,
            _two_versions("agreed_already"),
            "take what the update has agreed on over the stages",
        )
        for name in (
            "logical_and_across_model_parallel_group",
            "reduce_max_stat_across_model_parallel_group",
        )
    ),
)
METRICS_HOOKS = (
    Hook(
        "megatron.training.training",
        "training_log",
        _training_log,
        "log what the pipeline costs beside Megatron's own figures",
        native=_listen(
            lambda: {
                "on_train_step_end": lambda step: pipeline_loop.log_metrics(int(step.iteration))
            }
        ),
    ),
)
COLLAPSE_HOOKS = (
    Hook(
        "megatron.training.training",
        "train",
        _collapse("watched_train"),
        "watch the loss from the start of training to its end",
        native=_collapse_events("on_train_start", "on_train_end"),
    ),
    Hook(
        "megatron.training.training",
        "training_log",
        _collapse("watched_training_log"),
        "see the loss of every step",
        native=_collapse_events("on_train_step_end"),
    ),
    Hook(
        "megatron.training.training",
        "checkpoint_and_decide_exit",
        _collapse("watched_checkpoint_and_decide_exit"),
        "save a checkpoint or stop after an alarm",
    ),
    Hook(
        "megatron.training.checkpointing",
        "save_checkpoint",
        _collapse("watched_save_checkpoint"),
        "keep the watch's state with a checkpoint",
    ),
)
JITTER_HOOKS = jitter_hooks(pipeline_loop.jitter_of_this_stage)
