"""`pretrain_gpt.py` with one data-parallel rank whose optimizer is frozen from an iteration on.

That is how a real fault looks: a job restarts on other machines, one of them computes its updates
into memory that nothing reads, and the loss goes on falling, only less. The iteration is in
MEGATRON_EXT_FAULT_FROM. For `train_family.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pretrain_gpt


def freeze(optimizer: type[torch.optim.Optimizer], first: int) -> None:
    """Let rank 0's steps of this class do nothing from iteration `first` (from 0) on."""
    step = optimizer.step

    def step_or_not(self: torch.optim.Optimizer, *args: Any, **named: Any) -> Any:
        from megatron.training import get_args

        frozen = torch.distributed.get_rank() == 0 and get_args().curr_iteration >= first
        return None if frozen else step(self, *args, **named)

    optimizer.step = step_or_not  # type: ignore[method-assign]


if __name__ == "__main__":
    fault_from = int(os.environ["MEGATRON_EXT_FAULT_FROM"])
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        if "step" in vars(kind):
            freeze(kind, fault_from)
    pretrain_gpt.main()
