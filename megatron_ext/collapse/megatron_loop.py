"""The watch over the loss inside Megatron's training loop: what hooks put around its functions.

All ranks come by here; the last one, which has the loss and Megatron's writers, watches. What
several ranks must do together, saving a checkpoint or stopping, is decided there and sent to all.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.arguments import (
    COLLAPSE_ACTIONS,
    COLLAPSE_EXIT_CODE,
    CollapseConfig,
    collapse_config,
)
from megatron_ext.collapse.alarm import Alarm
from megatron_ext.collapse.callback import CollapseCallback, Outlets, StepFacts
from megatron_ext.collapse.controls import Controls, controls_of
from megatron_ext.collapse.curve import Curve
from megatron_ext.collapse.curve_file import read_curve
from megatron_ext.collapse.history import History
from megatron_ext.collapse.monitor import MonitorConfig
from megatron_ext.collapse.power_law import fit_power_law
from megatron_ext.collapse.sent_alerts import SentAlerts
from megatron_ext.collapse.timeline import NEAR
from megatron_ext.errors import UsageError

Function = Callable[..., Any]

STATE_FILE = "collapse.json"
"""The watch's file in the folder of a checkpoint."""
ALERTS_FILE = "collapse-alerts.jsonl"
"""The alerts sent, in the folder of all checkpoints: one sent since the last checkpoint must not be
sent again after a restart."""
_NO_ACTION, _CHECKPOINT, _STOP = 0, 1, 2


@dataclass(frozen=True)
class Step:
    """What Megatron's callbacks are told after a step, by the same names."""

    loss_dict: dict[str, Any]
    grad_norm: float | None
    skipped_iter: int
    facts: StepFacts


class _Loop:
    """One training's watch; `callback` is None on ranks that do not watch."""

    def __init__(self, config: CollapseConfig) -> None:
        self.config = config
        self.callback: CollapseCallback | None = None
        self.stopped = False


_loop: _Loop | None = None


def read_references(config: CollapseConfig) -> list[Curve]:
    """The curves of --collapse-reference.

    Raises:
        UsageError: One is no curve file.
    """
    for name in config.references:
        if not Path(name).exists():
            raise UsageError(
                f"--collapse-reference {name}: no such file; megatron-ext collapse fit makes one "
                "of a finished run"
            )
    return [read_curve(Path(name)) for name in config.references]


def watched_train(original: Function) -> Function:
    """Megatron's `train` with the watch around it."""
    signature = inspect.signature(original)

    def train(*args: Any, **named: Any) -> Any:
        global _loop
        model = signature.bind(*args, **named).arguments["model"]
        _loop = _start(model)
        if _loop.callback is not None:
            _loop.callback.on_train_start()
        try:
            result = original(*args, **named)
        except SystemExit as end:
            if _loop.callback is not None:
                _loop.callback.on_train_end()
            if _loop.stopped and not end.code:
                raise SystemExit(COLLAPSE_EXIT_CODE) from None
            raise
        if _loop.callback is not None:
            _loop.callback.on_train_end()
        return result

    return train


def watched_training_log(original: Function) -> Function:
    """Megatron's `training_log`, which sees every step, and then the watch."""
    signature = inspect.signature(original)

    def training_log(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        if _loop is not None and _loop.callback is not None:
            try:
                _after_step(_loop.callback, signature.bind(*args, **named).arguments)
            except Exception as error:  # the watch must not end the training that it watches
                _say(f"the watch is off from here on: {type(error).__name__}: {error}")
                _loop.callback = None
        return result

    return training_log


def watched_checkpoint_and_decide_exit(original: Function) -> Function:
    """Megatron's `checkpoint_and_decide_exit`, and then what an alarm asks for."""
    signature = inspect.signature(original)

    def checkpoint_and_decide_exit(*args: Any, **named: Any) -> Any:
        should_exit = original(*args, **named)
        if _loop is None or should_exit:
            return should_exit
        from megatron.training import get_args

        given = signature.bind(*args, **named).arguments
        iteration = int(given["iteration"])
        if iteration % get_args().log_interval:
            return should_exit
        action = _agreed_action(_loop)
        if action == _NO_ACTION:
            return should_exit
        _save(given, iteration)
        if action == _STOP:
            _loop.stopped = True
            return True
        return should_exit

    return checkpoint_and_decide_exit


def watched_save_checkpoint(original: Function) -> Function:
    """Megatron's `save_checkpoint`, and then the watch's state beside it."""
    signature = inspect.signature(original)

    def save_checkpoint(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        if _loop is not None and _loop.callback is not None:
            given = signature.bind(*args, **named)
            given.apply_defaults()
            _save_state(
                _loop.callback,
                int(given.arguments["iteration"]),
                bool(given.arguments.get("non_persistent_ckpt", False)),
            )
        return result

    return save_checkpoint


def _start(model: Any) -> _Loop:
    from megatron.training import get_args

    args = get_args()
    config = collapse_config(args)
    assert config is not None
    loop = _Loop(config)
    params = _count_parameters(model)
    if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return loop
    references = read_references(config)
    controls = controls_of_arguments(args, params)
    expected = config.expected_final_loss
    if config.align == "power-law":
        expected = _power_law(references, params)
    alert: Callable[[Alarm], None] = _no_alert
    if config.action != "log":
        alert = _AlertOnce(sent_alerts(args), NEAR * args.train_iters)
    loop.callback = CollapseCallback(
        references,
        controls,
        MonitorConfig(config.window, config.false_alarm_rate, expected_final_loss=expected),
        iterations=int(args.train_iters),
        outlets=Outlets(_write_metrics, _say, alert, facts=lambda step: step.facts),
        force=config.force,
    )
    if args.iteration:
        _load_state(loop.callback, args)
    return loop


def controls_of_arguments(args: Any, params: float) -> Controls:
    """The controls of a run from Megatron's arguments.

    Args:
        args: Megatron's.
        params: number of parameters of the whole model.
    """
    metadata = {name: str(value) for name, value in vars(args).items() if value is not None}
    metadata["params"] = str(params)
    end = float(args.train_iters)
    points = torch.tensor([end - 1, end], dtype=torch.float64).numpy()
    history = History("this run", points, points, metadata=metadata, end_step=end)
    controls, _ = controls_of(history)
    return controls


def _count_parameters(model: Any) -> float:
    """Parameters of the whole model; every rank must call this."""
    from megatron.core import parallel_state

    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    mine = 0.0
    for chunk in model:
        for parameter in chunk.parameters():
            # The last stage holds a copy of the first one's embedding.
            if getattr(parameter, "shared_embedding", False) and not is_first:
                continue
            split = getattr(parameter, "tensor_model_parallel", False)
            mine += parameter.numel() / (1 if split else tensor_parallel)
    total = torch.tensor([mine], dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return float(total.item())


def _power_law(references: list[Curve], params: float) -> float:
    points = [
        (each.controls.params, each.final_loss)
        for each in references
        if each.controls.params and each.final_loss
    ]
    try:
        law = fit_power_law([n for n, _ in points], [loss for _, loss in points])
    except UsageError as error:
        raise UsageError(f"--collapse-align power-law: {error}") from None
    return law.at(params)


def _after_step(callback: CollapseCallback, given: dict[str, Any]) -> None:
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args

    args = get_args()
    iteration = int(given["iteration"])
    samples = int(args.consumed_train_samples)
    rate = given.get("learning_rate")
    facts = StepFacts(
        iteration=iteration,
        fraction=samples / args.train_samples
        if args.train_samples
        else iteration / args.train_iters,
        learning_rate=None if rate is None else float(rate),
        batch_size=int(get_current_global_batch_size()),
        samples=samples,
    )
    skipped = int(given["skipped_iter"])
    callback.on_train_step_end(Step(given["loss_dict"], given.get("grad_norm"), skipped, facts))
    if iteration % args.log_interval == 0:
        callback.on_log()
        _summarise(callback)


def _agreed_action(loop: _Loop) -> int:
    """What the last rank wants done, on every rank."""
    level = COLLAPSE_ACTIONS.index(loop.config.action)
    if level < COLLAPSE_ACTIONS.index("checkpoint"):
        return _NO_ACTION
    wanted = _NO_ACTION
    if loop.callback is not None and loop.callback.take_action():
        wanted = _STOP if loop.config.action == "stop" else _CHECKPOINT
    last = torch.distributed.get_world_size() - 1
    decision = torch.tensor([wanted], dtype=torch.int32, device="cuda")
    torch.distributed.broadcast(decision, last)
    return int(decision.item())


def _save(given: dict[str, Any], iteration: int) -> None:
    """Save a checkpoint through Megatron's own path, unless it has just done so."""
    from megatron.training import get_args, training

    args = get_args()
    if not args.save:
        _say_once_per_job("no checkpoint is saved: --save is not given")
        return
    if args.save_interval and iteration % args.save_interval == 0:
        return
    names = inspect.signature(training.save_checkpoint_and_time).parameters
    training.save_checkpoint_and_time(**{name: given[name] for name in given if name in names})


def _checkpoint_folder(root: str, iteration: int) -> Path:
    from megatron.training.checkpointing import get_checkpoint_name

    return Path(get_checkpoint_name(root, iteration, return_base_dir=True))


def _save_state(callback: CollapseCallback, iteration: int, non_persistent: bool) -> None:
    from megatron.training import get_args

    args = get_args()
    root = getattr(args, "non_persistent_global_ckpt_dir", None) if non_persistent else args.save
    if not root:  # kept in memory or on another node's disk
        return
    folder = _checkpoint_folder(root, iteration)
    partial = folder / f".{STATE_FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(callback.state()))
        partial.replace(folder / STATE_FILE)
    except OSError as error:  # the checkpoint itself is saved; training must go on
        _say(f"the state is not saved: {error}")


def _load_state(callback: CollapseCallback, args: Any) -> None:
    roots = [args.load, getattr(args, "non_persistent_global_ckpt_dir", None)]
    for root in filter(None, roots):
        file = _checkpoint_folder(root, args.iteration) / STATE_FILE
        try:
            state = json.loads(file.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            _say(f"{file} cannot be read, statistics start anew: {error}")
            break
        if callback.restore(state):
            _say(f"statistics go on from iteration {args.iteration}")
        else:
            _say(f"{file} is of another reference or version, statistics start anew")
        break
    else:
        _say(f"no statistics in the checkpoint of iteration {args.iteration}: they start anew")
    callback.restarted(int(args.iteration))


def _write_metrics(metrics: dict[str, float], iteration: int) -> None:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in metrics.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(metrics, iteration)


def _say(text: str) -> None:
    print(f"megatron_ext: collapse: {text}", flush=True)


def _say_once_per_job(text: str) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        _say(text)


def _summarise(callback: CollapseCallback) -> None:
    """Bring the summary of wandb's run up to date."""
    from megatron.training.global_vars import get_wandb_writer

    wandb = get_wandb_writer()
    if wandb is None:
        return
    # The last value of each metric, such as the predicted final loss, is there by itself.
    summary: dict[str, Any] = {
        "collapse/alarms": len(callback.alarms),
        "collapse/compared with": "nothing" if callback.refused else callback.reference.source,
    }
    if callback.alarms:
        summary["collapse/first alarm at iteration"] = callback.alarms[0].step
        summary["collapse/last alarm"] = str(callback.alarms[-1])
    wandb.run.summary.update(summary)


def _no_alert(alarm: Alarm) -> None:
    """--collapse-action log: the console and the metrics are all."""


def sent_alerts(args: Any) -> SentAlerts:
    """Which alerts this run has sent, also before it was restarted."""
    sent = SentAlerts(Path(args.save) / ALERTS_FILE if args.save else None)
    if not args.iteration:  # a new run in an old folder
        sent.forget()
    return sent


class _AlertOnce:
    """Sends an alarm through wandb, unless this run has done so before.

    Args:
        sent: those sent.
        width: alarms of a kind that began within so many steps are one event.
    """

    def __init__(self, sent: SentAlerts, width: float) -> None:
        self._sent, self._width = sent, width

    def __call__(self, alarm: Alarm) -> None:
        from megatron.training.global_vars import get_wandb_writer

        wandb = get_wandb_writer()
        if wandb is None or self._sent.has(alarm, self._width):
            return
        try:
            # wandb would hold back an alert of the same title for a minute.
            wandb.alert(f"collapse: {alarm.kind}", str(alarm), level="WARN", wait_duration=0.001)
            self._sent.add(alarm)
        except Exception as error:  # wandb's, the server's, the disk's: no reason to end a training
            _say(f"wandb took no alert: {error}")


def check_usable(config: CollapseConfig, args: Any) -> None:
    """Read the references before anything is built.

    Raises:
        UsageError: One cannot be read, or this training logs no loss to watch.
    """
    references = read_references(config)
    if config.align == "power-law":
        _power_law(references, 1e9)
    if getattr(args, "perform_rl_step", False):
        raise UsageError("--collapse-reference does not support --perform-rl-step")
