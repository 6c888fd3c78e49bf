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


@contextlib.contextmanager
def fork_random_state(
    seed: int, iteration: int, microbatch: int, chunk: int, device: torch.device
) -> Iterator[None]:
    """Run one forward with random states of its own; afterwards all are as before.

    Every state that Megatron tracks, PyTorch's default generator of `device` and that of the CPU
    are set from the arguments and this rank's place in the model, whatever ran before.
    Recomputation in the backward is covered too: Megatron saves the forward's states for it.

    Args:
        seed: The run's seed, plus whatever should make replicas differ.
        iteration: Number of the training iteration.
        microbatch: Number of the microbatch in its batch.
        chunk: Model chunk of this stage.
        device: Where the model is.
    """
    tracker = get_cuda_rng_tracker()
    stage = parallel_state.get_pipeline_model_parallel_rank()

    def state(name: str, generator: torch.Generator) -> torch.Tensor:
        group_rank = _GROUP_RANKS.get(name, int)()
        key = f"{seed} {name} {stage} {group_rank} {iteration} {microbatch} {chunk}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        # Generators take any 64-bit seed; a signed one on some devices.
        return generator.manual_seed(int.from_bytes(digest, "little") >> 1).get_state()

    on_gpu = device.type == "cuda"
    scratch = torch.Generator(device)
    cpu_scratch = torch.Generator() if on_gpu else scratch
    tracked_before = tracker.get_states()
    cpu_before = torch.get_rng_state()
    gpu_before = torch.cuda.get_rng_state() if on_gpu else None
    tracker.set_states({name: state(name, scratch) for name in tracked_before})
    torch.set_rng_state(state("cpu", cpu_scratch))
    if on_gpu:
        torch.cuda.set_rng_state(state("default", scratch))
    try:
        yield
    finally:
        tracker.set_states(tracked_before)
        torch.set_rng_state(cpu_before)
        if gpu_before is not None:
            torch.cuda.set_rng_state(gpu_before)
