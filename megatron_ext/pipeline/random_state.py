"""Random state per (iteration, microbatch, chunk), so that dropout never depends on order."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

# Megatron's tensor-parallel and expert random states differ between the ranks of these groups;
# its other states are equal there, and all of them differ between pipeline stages.
_GROUP_RANKS: dict[str, Callable[[], int]] = {
    "model-parallel-rng": parallel_state.get_tensor_model_parallel_rank,
    "expert-parallel-rng": parallel_state.get_expert_model_parallel_rank,
}


class RandomStates:
    """Gives the forwards of one stage their random states.

    Args:
        seed: The run's seed, plus whatever should make replicas differ.
        device: Where the model is.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._scratch = torch.Generator(device)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around the tasks of a batch: afterwards all random states are as before."""
        tracker = get_cuda_rng_tracker()
        tracked = tracker.get_states()
        on_cpu = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if self._device.type == "cuda" else None
        try:
            yield
        finally:
            tracker.set_states(tracked)
            torch.set_rng_state(on_cpu)
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu)

    def begin(self, iteration: int, microbatch: int, chunk: int) -> None:
        """Set the random states of one forward, whatever ran before.

        All states that Megatron tracks and PyTorch's default ones are set from the arguments and
        this rank's place in the model. Recomputation in the backward is covered too: Megatron
        saves the forward's states for it.

        Args:
            iteration: Number of the training iteration.
            microbatch: Number of the microbatch in its batch.
            chunk: Model chunk of this stage.
        """
        # This runs before every forward: the default generators are seeded in place.
        which = f"{self._stage} 0 {iteration} {microbatch} {chunk}"
        torch.default_generator.manual_seed(self._number(f"cpu {which}"))
        if self._device.type == "cuda":
            torch.cuda.manual_seed(self._number(f"default {which}"))
        tracker = get_cuda_rng_tracker()
        names = tracker.get_states()
        if names:
            tracker.set_states(
                {name: self._state(name, iteration, microbatch, chunk) for name in names}
            )

    def _state(self, name: str, iteration: int, microbatch: int, chunk: int) -> torch.Tensor:
        group_rank = _GROUP_RANKS.get(name, int)()
        key = f"{name} {self._stage} {group_rank} {iteration} {microbatch} {chunk}"
        return self._scratch.manual_seed(self._number(key)).get_state()

    def _number(self, key: str) -> int:
        digest = hashlib.blake2b(f"{self._seed} {key}".encode(), digest_size=8).digest()
        # Generators take any 64-bit seed; a signed one on some devices.
        return int.from_bytes(digest, "little") >> 1
