"""What a checkpoint needs beyond Megatron's own: the older weight version.

The next batch computes on it. Newest weights, optimizer and, within its state, the last update of
error feedback are in Megatron's checkpoint anyhow. A checkpoint without these entries is one of a
synchronous run, from which delayed training starts anew; and Megatron ignores them where a run is
synchronous again.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model

from megatron_ext.errors import UsageError
from megatron_ext.pipedream_2bw.delayed_updates import DelayedUpdates

ENTRY = "pipedream_2bw"


class Checkpoint:
    """Adds to Megatron's state dicts, and takes from them.

    Args:
        delayed: The stage's two versions.
        models: Its model chunks.
    """

    def __init__(self, delayed: DelayedUpdates, models: list[Any]) -> None:
        self._delayed = delayed
        self._models = unwrap_model(models)
        self._found: dict[str, Any] | None = None
        """The entry of the checkpoint that is being loaded."""

    def save(self, state: dict[str, Any], args: Any, model_options: dict[str, Any] | None) -> None:
        """Add this stage's entry to a state dict that is to be saved."""
        delayed, weights = self._delayed, self._delayed.weights
        if not delayed.delays(weights.newest):
            return
        feedback = delayed.error_feedback
        entry: dict[str, Any] = {
            "first": delayed.first,
            "loss scale": delayed.scale_of_next(),
            "feeds back": feedback is not None and feedback.holds_history,
            "keeps older": weights.newest > delayed.first,
        }
        if entry["keeps older"]:
            entry["older"] = self._older(args, model_options)
        state[ENTRY] = entry

    def find(self, state: dict[str, Any] | None, finetune: bool) -> None:
        """Look at what a checkpoint holds, before its tensors are read."""
        self._found = None if state is None or finetune else state.get(ENTRY)
        feedback = self._delayed.error_feedback
        if feedback is not None and self._found and self._found["feeds back"]:
            feedback.make_room()

    def ask(self, state: dict[str, Any], args: Any, model_options: dict[str, Any] | None) -> None:
        """Add what is to be read to the state dict that says so."""
        if self._found is not None:
            entry = {key: value for key, value in self._found.items() if key != "older"}
            if self._found["keeps older"]:
                entry["older"] = self._older(args, model_options)
            state[ENTRY] = entry

    def load(self, state: dict[str, Any]) -> None:
        """Take the older version from a state dict whose tensors have been read."""
        entry = state.pop(ENTRY, None)
        if entry is None or self._found is None:
            return
        weights = self._delayed.weights
        if entry["keeps older"]:
            weights.select_older()
            with torch.no_grad():
                for model, older in zip(self._models, entry["older"], strict=True):
                    missing = model.load_state_dict(older, strict=False).missing_keys
                    if any(not name.endswith("_extra_state") for name in missing):
                        raise UsageError(
                            f"--load: the checkpoint's older weight version has no {missing[0]}; "
                            "start anew with --finetune"
                        )
            weights.select_newest()
        self._delayed.go_on_from(entry["first"], entry["loss scale"])

    def _older(self, args: Any, model_options: dict[str, Any] | None) -> list[Any]:
        """The older version of all chunks, in the form of the checkpoint's format."""
        weights = self._delayed.weights
        weights.select_older()
        try:
            if args.ckpt_format != "torch_dist":
                return [_copied(model.state_dict_for_save_checkpoint()) for model in self._models]
            return [self._sharded(model, model_options) for model in self._models]
        finally:
            weights.select_newest()

    def _sharded(self, model: Any, options: dict[str, Any] | None) -> Any:
        sharded = model.sharded_state_dict(**(options or {}))
        for value in nested_values(sharded):
            if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
                # Parameters point to the newest version again when this is written.
                value.data = value.data.detach().clone()
        add_prefix_for_sharding(sharded, f"{ENTRY}.older.")
        return sharded


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state
