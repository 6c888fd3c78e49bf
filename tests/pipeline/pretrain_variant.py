"""`scripts/pretrain_gpt.py` with what Megatron has in its configuration but no flag for.

Takes two flags of its own before Megatron sees them: ``--variable-lengths`` gives every
microbatch a length of its own; ``--partial-checkpoints N`` checkpoints the activations of all but
N microbatches of a window, and prints of which.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import pretrain_gpt
import torch
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import arguments, get_args

_next_batch = pretrain_gpt.next_batch
_forward_step = pretrain_gpt.forward_step
_model_config = arguments.core_transformer_config_from_args


def own_flag(name: str, values: int) -> list[str] | None:
    """Take a flag and its values out of the command line."""
    if name not in sys.argv:
        return None
    at = sys.argv.index(name)
    flag = sys.argv[at + 1 : at + 1 + values]
    del sys.argv[at : at + 1 + values]
    return flag


VARIABLE_LENGTHS = own_flag("--variable-lengths", 0) is not None
PARTIAL_CHECKPOINTS = own_flag("--partial-checkpoints", 1)


def model_config(args: Any, *rest: Any, **named: Any) -> Any:
    """Megatron's, with the settings that have no flag."""
    config = _model_config(args, *rest, **named)
    config.variable_seq_lengths = VARIABLE_LENGTHS
    if PARTIAL_CHECKPOINTS:
        config.num_microbatches_with_partial_activation_checkpoints = int(PARTIAL_CHECKPOINTS[0])
    return config


def next_batch(iterator: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """The next microbatch, cut to a length that its first tokens determine."""
    batch = _next_batch(iterator, vp_stage)
    if not VARIABLE_LENGTHS or batch["tokens"] is None:
        return batch
    length = get_args().seq_length // 4 * (1 + int(batch["tokens"][:, :8].sum()) % 4)
    print(f"length {length}")
    for name, tensor in batch.items():
        if isinstance(tensor, torch.Tensor):
            is_mask = name == "attention_mask"
            batch[name] = tensor[..., :length, :length] if is_mask else tensor[:, :length]
    return batch


def forward_step(
    iterator: Iterator[dict[str, Any]], model: Any, checkpoint: bool | None = None
) -> tuple[torch.Tensor, Any]:
    """One microbatch through this stage, checkpointing all layers or none if told which."""
    if checkpoint is not None:
        get_model_config(model).recompute_granularity = "full" if checkpoint else None
        print(f"checkpointed: chunk {get_attr_wrapped_model(model, 'vp_stage')} {checkpoint}")
    return _forward_step(iterator, model)


pretrain_gpt.core_transformer_config_from_args = model_config
pretrain_gpt.next_batch = next_batch
pretrain_gpt.forward_step = forward_step

if __name__ == "__main__":
    pretrain_gpt.main()
