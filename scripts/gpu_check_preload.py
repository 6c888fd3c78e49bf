"""Imported once by the server that the ranks of ``gpu_check.py --dry-run-cpu`` are forked from."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_ext import cpu

cpu.enable()

import megatron.training  # noqa: E402
import megatron.training.checkpointing  # noqa: E402, F401
import pretrain_gpt  # noqa: E402, F401
import torch  # noqa: E402

import megatron_ext.__main__  # noqa: E402
import megatron_ext.hooks  # noqa: E402
import megatron_ext.pipeline.stage  # noqa: E402, F401

torch.set_num_threads(1)
