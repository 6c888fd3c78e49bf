"""Two weight versions inside Megatron's training loop: what hooks put around its functions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import num_microbatches_calculator as calculators
from megatron.core import parallel_state
from megatron.training import get_args

from megatron_ext.arguments import Pipedream2bwConfig, describe, pipedream_2bw_config
from megatron_ext.errors import UsageError
from megatron_ext.pipedream_2bw import background
from megatron_ext.pipedream_2bw.checkpoint import Checkpoint
from megatron_ext.pipedream_2bw.clipping import clip_by
from megatron_ext.pipedream_2bw.delayed_updates import DelayedUpdates
from megatron_ext.pipedream_2bw.error_feedback import saves_listed_states_only
from megatron_ext.pipedream_2bw.leaf_optimizers import leaf_optimizers
from megatron_ext.pipedream_2bw.shadow_groups import shadow_of

Function = Callable[..., Any]

_DEGRADES = (
    "--optimizer {} loses more by the delay than muon: in small trials Adam lost 0.62 nats per "
    "byte (0.47 with error feedback), muon 0.25 (0.10); use --optimizer muon (docs/convergence.md)"
)

_delayed: DelayedUpdates | None = None
_checkpoint: Checkpoint | None = None
_loading = False


def current() -> DelayedUpdates | None:
    """The two versions of this stage; None before its model is made."""
    return _delayed


def announce(config: Pipedream2bwConfig, args: Any) -> None:
    """Say on the first rank what is on, and set what of Megatron's flags must give way."""
    lines = [f"two weight versions: {describe(config)}"]
    if "muon" not in args.optimizer:
        lines.append(f"--pipedream-2bw: {_DEGRADES.format(args.optimizer)}")
    if getattr(args, "rerun_mode", "disabled") != "disabled":
        # By the time a batch's losses are validated, tasks of the next one have run.
        args.rerun_mode = "disabled"
        lines.append(
            "--pipedream-2bw sets --rerun-mode disabled: a batch cannot be repeated once the next "
            "one has begun, so a NaN ends the run at once"
        )
    if args.rank == 0:
        for line in lines:
            print(f"megatron_ext: {line}")


def keep_two_versions(original: Function) -> Function:
    """Around the setup of model and optimizer: keep two versions of the weights."""

    def setup_model_and_optimizer(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        model, optimizer, *_ = result
        if _delayed is None:  # nothing was loaded
            _make(model, optimizer)
        assert _delayed is not None
        _delayed.begin_at(get_args().iteration)
        return result

    return setup_model_and_optimizer


def _make(model: list[Any], optimizer: Any) -> None:
    global _delayed, _checkpoint
    args = get_args()
    config = pipedream_2bw_config(args)
    assert config is not None
    _check_history_is_saved(config, optimizer, args)
    clip_by(config.clip, optimizer)
    # Tied embeddings are reduced over the first and the last stage: each waits for the other.
    ties = parallel_state.get_pipeline_model_parallel_world_size() > 1 and not getattr(
        args, "untie_embeddings_and_output_weights", False
    )
    _delayed = DelayedUpdates(
        config,
        model,
        optimizer,
        end=args.train_iters,
        batch_size=_microbatches_of,
        two_gradient_buffers=config.clip == "exact" or ties,
    )
    _checkpoint = Checkpoint(_delayed, model)


def _check_history_is_saved(config: Pipedream2bwConfig, optimizer: Any, args: Any) -> None:
    """Refuse a format of checkpoints that would lose the last update.

    Raises:
        UsageError: Error feedback needs it, and this Megatron does not save it so.
    """
    if not (args.save and config.error_feedback):
        return
    if not any(saves_listed_states_only(one) for one in leaf_optimizers(optimizer)):
        return
    flag = None
    if args.ckpt_format != "torch_dist":
        flag = f"--ckpt-format {args.ckpt_format}"
    elif getattr(args, "dist_ckpt_optim_fully_reshardable", False):
        flag = "--dist-ckpt-optim-fully-reshardable"
    if flag is not None:
        raise UsageError(
            f"--pipedream-2bw: with --use-distributed-optimizer, {flag} of this Megatron saves no "
            "last update, which error feedback needs; leave it out, use Megatron 0.19 or newer, "
            "or set --pipedream-2bw-error-feedback 0"
        )


def load_two_versions(original: Function) -> Function:
    """Around the loading of a checkpoint: make the versions before, so that both can be read."""

    def load_checkpoint(ddp_model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
        global _loading
        if _delayed is None and optimizer is not None:
            _make(ddp_model, optimizer)
        _loading = True
        try:
            return original(ddp_model, optimizer, *rest, **named)
        finally:
            _loading = False

    return load_checkpoint


def read_older_version(original: Function) -> Function:
    """Around the reading of a checkpoint: take the older version out."""

    def load_base_checkpoint(load_dir: Any, args: Any, rank0: bool = False, **named: Any) -> Any:
        result = original(load_dir, args, rank0=rank0, **named)
        state = result[0]
        if _loading and _checkpoint is not None and state is not None:
            if rank0:
                _checkpoint.find(state, args.finetune)
            else:
                if "sharded_state_dict" not in named:
                    _checkpoint.find(state, args.finetune)
                _checkpoint.load(state)
        return result

    return load_base_checkpoint


def add_older_version(original: Function) -> Function:
    """Around the making of a state dict: add the older version, or ask for it."""

    def generate_state_dict(args: Any, *rest: Any, **named: Any) -> Any:
        state = original(args, *rest, **named)
        if _checkpoint is not None:
            act = _checkpoint.ask if _loading else _checkpoint.save
            act(state, args, named.get("model_sd_kwargs"))
        return state

    return generate_state_dict


def _microbatches_of(iteration: int) -> int:
    """Number of microbatches of the iteration after the one under way."""
    args = get_args()
    calculator = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if not hasattr(calculator, "update"):
        return int(calculators.get_num_microbatches())
    following = copy.deepcopy(calculator)
    consumed = args.consumed_train_samples + calculators.get_current_running_global_batch_size()
    following.update(consumed, False, False)
    return int(following.get())


def agreed_already(original: Function) -> Function:
    """What an update has agreed on over all stages need not be reduced over them once more."""
    signature = inspect.signature(original)

    def reduce_over_stages(*args: Any, **named: Any) -> Any:
        if _delayed is not None and _delayed.agreed:
            value = next(iter(signature.bind(*args, **named).arguments.values()))
            # It would have passed through a tensor of Megatron's type.
            return torch.tensor(value).item() if value is not None else None
        return original(*args, **named)

    return reduce_over_stages


def yielding_collective(original: Function) -> Function:
    """A collective of PyTorch that an update waits for while tasks run."""
    return background.yielding(original, shadow_of)


def yielding_coalescing(original: Function) -> Function:
    """PyTorch's coalescing manager, whose end an update waits for while tasks run."""
    return background.yielding_coalescing(original)
