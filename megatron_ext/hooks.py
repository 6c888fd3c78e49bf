"""The only file that changes Megatron: a table of what is replaced, by what, since when.

A hook names one function of Megatron. Installing it puts the replacement where the function is
defined and in every module that has imported it by name; uninstalling puts the original back in
all of these. Modules imported later find whatever is in place then.

Only the hooks on argument parsing are installed from the start. Once the arguments are known they
go, and the hooks of the capabilities that were asked for come; a run without our flags therefore
runs on Megatron's own objects.

A Megatron that carries the patches in ``patches/`` calls us by itself in some of these places. A
hook that names such a place joins in there and replaces nothing.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_ext import arguments, cpu, wandb_run
from megatron_ext.errors import UsageError
from megatron_ext.pipeline import transformer_engine
from megatron_ext.pipeline.hints import find_hint
from megatron_ext.pipeline.jitter import (
    DeviceStopwatch,
    HostStopwatch,
    Jitter,
    jittered_backward_step,
    jittered_forward_step,
)
from megatron_ext.pipeline.run_facts import RunFacts, without_secrets
from megatron_ext.start_checks import check_data

if TYPE_CHECKING:
    from megatron_ext.pipeline.metrics import Metrics
    from megatron_ext.pipeline.stage import StageExecutor

SUPPORTED_MEGATRON = ">=0.17,<0.21"

Function = Callable[..., Any]


@dataclass(frozen=True)
class NativePlace:
    """Where a patched Megatron calls us by itself."""

    module: str
    """There if this Megatron is patched."""
    join: Callable[[Any], Callable[[], None]]
    """Joins in, given that module; returns what undoes it."""


@dataclass(frozen=True)
class Hook:
    """One replacement in Megatron."""

    module: str
    name: str
    wrap: Callable[[Function], Function]
    """Makes the replacement from the original."""
    why: str
    versions: str = SUPPORTED_MEGATRON
    """Versions of Megatron whose function is known to be the one that `wrap` expects."""
    native: NativePlace | None = None
    """What a patched Megatron has instead."""

    @property
    def target(self) -> str:
        """Dotted name of the function."""
        return f"{self.module}.{self.name}"


_executor: StageExecutor | None = None
_metrics: Metrics | None = None
_summary: wandb_run.PipelineSummary | None = None
_described = False
_jitter: Jitter | None = None

_installed: dict[Hook, Callable[[], None]] = {}
"""Every hook in place, and what takes it out."""


def megatron_version() -> Version:
    """The version of the Megatron that would be used, a checkout's or an installed one.

    Raises:
        UsageError: There is none.
    """
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        package_info = Path(folder) / "core" / "package_info.py"
        if package_info.is_file():  # read on its own: importing megatron.core takes seconds
            return _read_version(package_info)
    raise UsageError(
        f"no Megatron found: install 'megatron-core{SUPPORTED_MEGATRON}', or give a script that "
        "lies in a Megatron-LM checkout"
    )


def _read_version(package_info: Path) -> Version:
    constants = {
        target.id: node.value.value
        for node in ast.parse(package_info.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    try:
        numbers = ".".join(str(constants[name]) for name in ("MAJOR", "MINOR", "PATCH"))
        return Version(numbers + str(constants["PRE_RELEASE"]))
    except (KeyError, InvalidVersion):
        raise UsageError(f"{package_info} does not tell Megatron's version") from None


def is_supported(version: Version) -> bool:
    """Whether this megatron_ext is tested with that Megatron."""
    return SpecifierSet(SUPPORTED_MEGATRON).contains(version, prereleases=True)


def check_version(allow_untested: bool = False) -> Version:
    """The version of Megatron, if it may be used.

    Raises:
        UsageError: There is no Megatron, or one outside the supported range and
            `allow_untested` is not set.
    """
    version = megatron_version()
    if not is_supported(version) and not allow_untested:
        raise UsageError(
            f"found Megatron {version}, supported are {SUPPORTED_MEGATRON}: install one of those "
            "or pass --allow-untested-megatron"
        )
    return version


def install(hooks: Iterable[Hook]) -> None:
    """Put `hooks` in place; those already in place stay as they are.

    Raises:
        UsageError: This Megatron has no such function.
    """
    for hook in hooks:
        if hook in _installed:
            continue
        if hook.native is not None and (place := _patched_in(hook.native.module)) is not None:
            _installed[hook] = hook.native.join(place)
            continue
        original = getattr(importlib.import_module(hook.module), hook.name, None)
        if original is None:
            raise UsageError(
                f"Megatron {megatron_version()} has no {hook.target}, which is needed to "
                f"{hook.why}; supported are {SUPPORTED_MEGATRON}"
            )
        # Megatron keeps state in attributes of some of its functions.
        replacement = functools.update_wrapper(hook.wrap(original), original)
        _rebind(original, replacement)
        _installed[hook] = functools.partial(_rebind, replacement, original)


def uninstall(hooks: Iterable[Hook] | None = None) -> None:
    """Take `hooks`, or all, out again."""
    for hook in installed() if hooks is None else list(hooks):
        if hook in _installed:
            _installed.pop(hook)()


def installed() -> list[Hook]:
    """The hooks in place."""
    return list(_installed)


def _patched_in(module: str) -> Any:
    """A module that only a patched Megatron has; None in others."""
    return importlib.import_module(module) if importlib.util.find_spec(module) else None


def batch_under_way() -> bool:
    """Whether a batch has begun that no call has ended (--pipedream-2bw)."""
    return _executor is not None and _executor.under_way


def explain(error: BaseException) -> str:
    """One line on an error that ended the run, with the stage's place in the pipeline if known."""
    if _executor is not None and _executor.connected:
        return _executor.explain(error)
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {reason}"


def _rebind(old: Function, new: Function) -> None:
    """Replace `old` by `new` in the name space of every imported module."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or module.__name__.startswith("megatron_ext."):
            continue
        for name, value in list(names.items()):
            if value is old:
                names[name] = new


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
        _describe_to_wandb()
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


def _wandb() -> Any:
    """The wandb module where Megatron writes to it: on the last rank; else None."""
    from megatron.training.global_vars import get_wandb_writer

    return get_wandb_writer()


def _describe_to_wandb() -> None:
    """Put our settings and tags into the run, once."""
    from megatron.training import get_args

    global _described
    if not _described and (wandb := _wandb()) is not None:
        wandb_run.describe(wandb.run, get_args())
        _described = True


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
        return _stage_executor(**named)

    return get_forward_backward_func


def _stage_executor(schedule_pg_collection: Any = None, **_: Any) -> StageExecutor:
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


def _select_schedule(registry: Any) -> Callable[[], None]:
    registry.register("rrfp", _stage_executor)
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


def _make_executor() -> StageExecutor:
    from megatron.core import parallel_state
    from megatron.training import get_args

    from megatron_ext.pipedream_2bw import megatron_loop
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
        jitter=_jitter_of_this_stage if args.rrfp_jitter else lambda: None,
        delayed=megatron_loop.current,
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
        _log_metrics(int(signature.bind(*args, **named).arguments["iteration"]))
        return result

    return training_log


def _log_metrics(iteration: int) -> None:
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
        _describe_to_wandb()  # a patched Megatron has not been through the hooks on arguments
        wandb.log(figures, iteration)
        if _summary is None:
            _summary = wandb_run.PipelineSummary(wandb.run.summary)
        _summary.take(figures, _metrics.batches)


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


def _jitter_of_this_stage() -> Jitter:
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


def _initialize_megatron(original: Function) -> Function:
    def initialize_megatron(*args: Any, **named: Any) -> Any:
        return original(*args, **{**named, "allow_no_cuda": True})

    return initialize_megatron


def _load_checkpoint(original: Function) -> Function:
    """Megatron's, mended for its distributed optimizer on the CPU.

    There, without Transformer Engine and apex, it uses PyTorch's own Adam. It takes the number of
    steps from a state that a new Adam does not have, overwrites what it has read of it, and lets
    all parameters share one counter, which each of them would count up. And parameters in fp32
    are written to although autograd watches them.
    """

    def load_checkpoint(ddp_model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
        adams = _distributed_adams(optimizer)
        for adam in adams:
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        with torch.no_grad():
            result = original(ddp_model, optimizer, *rest, **named)
        for adam in adams:
            for group in adam.param_groups:
                for parameter in group["params"]:
                    # Checkpoints keep the number of steps with the group.
                    adam.state[parameter]["step"] = torch.tensor(float(group.get("step", 0)))
        return result

    return load_checkpoint


def _distributed_adams(optimizer: Any) -> list[torch.optim.Optimizer]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    wrapped = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [each.optimizer for each in wrapped if isinstance(each, DistributedOptimizer)]
    return [each for each in inner if isinstance(each, torch.optim.Adam | torch.optim.AdamW)]


def comes_without_makefile() -> bool:
    """Whether this Megatron is a wheel, which brings its dataset helper compiled."""
    spec = importlib.util.find_spec("megatron")
    folders = [Path(f) / "core" for f in (spec.submodule_search_locations or ())] if spec else []
    used = next((folder for folder in folders if (folder / "package_info.py").is_file()), None)
    return used is not None and not (used / "datasets" / "Makefile").exists()


def _compile_helpers(_: Function) -> Function:
    def compile_helpers() -> None:
        importlib.import_module("megatron.core.datasets.helpers_cpp")

    return compile_helpers


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
        _initialize_megatron,
        "start without CUDA",
    ),
    Hook(
        "megatron.training.checkpointing",
        "load_checkpoint",
        _load_checkpoint,
        "go on from a checkpoint of the distributed optimizer with PyTorch's own Adam",
    ),
)
WHEEL_HOOKS = (
    Hook(
        "megatron.core.datasets.utils",
        "compile_helpers",
        _compile_helpers,
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
            lambda: {"on_train_step_end": lambda step: _log_metrics(int(step.iteration))}
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
JITTER_HOOKS = jitter_hooks(_jitter_of_this_stage)
