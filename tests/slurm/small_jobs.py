"""The shipped job files with a model that a CPU trains in seconds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.training import REPOSITORY

FILES = REPOSITORY / "scripts" / "slurm"
RRFP_FILE = FILES / "pretrain_gpt_rrfp.sbatch"
MUON_FILE = FILES / "pretrain_gpt_2bw_muon.sbatch"
FAMILY_FILE = FILES / "collapse_family.sbatch"


def small(corpus: Path, run: Path, **more: str) -> dict[str, str]:
    """Variables of a job with a tiny model, one rank per node."""
    return {
        "REPO": str(REPOSITORY),
        "PYTHON": sys.executable,
        "SCRIPT": str(REPOSITORY / "scripts" / "pretrain_gpt.py"),
        "LAUNCHER_FLAGS": "--cpu",
        "RUN_DIR": str(run),
        "RANKS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TP": "1",
        "PP": "2",
        "DATA_PATH": str(corpus),
        "TOKENIZER_FLAGS": "--tokenizer-type NullTokenizer --vocab-size 257"
        " --make-vocab-size-divisible-by 1",
        "MODEL_FLAGS": "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
        " --max-position-embeddings 32 --attention-dropout 0 --hidden-dropout 0",
        "PRECISION_FLAGS": "",
        "OPTIMIZER_FLAGS": "--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --weight-decay 0.1",
        "LOG_FLAGS": "--log-interval 1 --eval-interval 1000 --eval-iters 0 --split 90,5,5",
        "GLOBAL_BATCH_SIZE": "8",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def command_of(file: Path, variables: dict[str, str], nodes: int = 2) -> list[str]:
    """What the job would start on each node."""
    result = subprocess.run(
        ["bash", str(file)],
        env={**os.environ, **variables, "NODES": str(nodes), "DRY_RUN": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


def training_flags(file: Path, variables: dict[str, str], nodes: int = 2) -> list[str]:
    """The flags behind the script in what the job would start."""
    words = command_of(file, variables, nodes)
    return words[words.index(variables["SCRIPT"]) + 1 :]


def losses_in(log: str) -> dict[int, str]:
    """The loss of each iteration as Megatron's log prints it."""
    losses: dict[int, str] = {}
    for iteration, loss in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", log):
        assert int(iteration) not in losses, f"iteration {iteration} was trained twice"
        losses[int(iteration)] = loss
    return losses


def expected_in_log(losses: list[float], starts: list[int]) -> dict[int, str]:
    """What Megatron prints of these losses.

    In the second iteration after each start it prints the average with the first one.
    """
    printed = {}
    for number, loss in enumerate(losses):
        value = loss
        if number - 1 in starts:
            value = float(np.float32(losses[number - 1]) + np.float32(loss)) / 2
        printed[number + 1] = f"{value:.6E}"
    return printed


def tensors_of(checkpoints: Path, iteration: int) -> dict[str, Any]:
    """Every tensor of a checkpoint, by name: weights, the optimizer's state and the schedule's.

    Not the states of random streams, from which a new data loader draws a number at each start.
    """
    folder = checkpoints / f"iter_{iteration:07d}"
    files = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))  # of the format "torch"
    state = {file.parent.name: torch.load(file, weights_only=False) for file in files}
    if not state:
        _load_state_dict(
            state,
            storage_reader=FileSystemReader(folder),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    return {name: tensor for name, tensor in _flat(state).items() if "rng_state" not in name}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = [_flat(item, f"{name}.{key}") for key, item in value.items()]
        return {key: tensor for item in items for key, tensor in item.items()}
    if isinstance(value, list | tuple):
        return _flat(dict(enumerate(value)), name)
    return {name: value} if hasattr(value, "tolist") and hasattr(value, "dtype") else {}
