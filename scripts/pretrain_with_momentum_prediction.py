"""`pretrain_gpt.py` whose error feedback predicts Muon's next update from its momentum.

The shipped correction takes the last update as the prediction of the next one. Here it is what
Muon would do next if the next gradient were zero: the momentum alone, orthogonalised. Parameters
of other optimizers keep the shipped correction. An experiment, for `bench_convergence.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pretrain_gpt

from megatron_ext.pipedream_2bw.error_feedback import KEY, ErrorFeedback

shipped = ErrorFeedback._step


@torch.no_grad()
def step_with_prediction(self: ErrorFeedback, inner: Any, step: Callable[[], Any]) -> Any:
    """W(k+1) = W(k) - u_k - lambda * (prediction of u_(k+1) - prediction of u_k)."""
    if not hasattr(inner, "orthogonalize"):
        return shipped(self, inner, step)
    result = step()
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            update = group["lr"] * inner.orthogonalize(parameter, state["momentum_buffer"])
            if self.corrects and (previous := state.get(KEY)) is not None:
                parameter.sub_(self.coefficient * (update - previous))
            state[KEY] = update
    return result


ErrorFeedback._step = step_with_prediction  # type: ignore[method-assign]

if __name__ == "__main__":
    pretrain_gpt.main()
