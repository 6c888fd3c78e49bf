"""A compact GPT pretraining script on `megatron.training.pretrain`.

The megatron-core wheel has no entry script; this one stands in where there is no Megatron-LM
checkout. It takes Megatron's own flags and knows nothing of megatron_ext: start it with
``python -m megatron_ext scripts/pretrain_gpt.py ...``, which also stands in for the Makefile that
the wheel lacks and Megatron runs at its start.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import arguments, get_args, get_timers, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def holds_data(vp_stage: int | None = None) -> bool:
    """Whether this stage reads tokens (the first one) or labels (the last one)."""
    return bool(
        mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        or mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    )


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this stage's part of a GPT from Megatron's arguments."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    transformer_engine = args.transformer_impl == "transformer_engine"
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=transformer_engine, vp_stage=vp_stage
        )
    elif transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def next_batch(iterator: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """The next microbatch, on the training device; empty on stages that need none."""
    if not holds_data(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    sample = next(iterator)
    batch = {
        key: sample[key].cuda(non_blocking=True) if sample.get(key) is not None else None
        for key in BATCH_KEYS
    }
    return get_batch_on_this_cp_rank(batch) if get_args().context_parallel_size > 1 else batch


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss, number of tokens, and both of them for Megatron's log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch through this stage."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Megatron's own GPTDataset for training, validation and test."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    built_here = partial(holds_data, vp_stage)
    return tuple(BlendedMegatronDatasetBuilder(dataset, samples, built_here, config).build())


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Run Megatron's pretraining with the signature that this Megatron has."""
    compile_helpers = dataset_utils.compile_helpers  # ours, under python -m megatron_ext
    is_megatrons = compile_helpers.__code__.co_filename == dataset_utils.__file__
    if is_megatrons and not Path(dataset_utils.__file__).with_name("Makefile").exists():
        sys.exit(
            "pretrain_gpt.py: error: this Megatron is a wheel, which lacks the Makefile that it "
            "runs at its start; start with: python -m megatron_ext scripts/pretrain_gpt.py ..."
        )
    parameters = inspect.signature(pretrain).parameters
    if "cfg_container" not in parameters:  # 0.17 parses the arguments itself
        pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args: argparse.Namespace = arguments.parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    main()
