"""Settings for a run of N parameters and D tokens that collapses with its family.

Batch and tau follow the family that arXiv 2509.25087 trains (Celerity, its Tables 2, 8 and 10).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.errors import UsageError

TAU_AT_ONE = 0.783
TAU_EXPONENT = -0.5
"""tau = 0.783 TPP^-0.5, fitted here to the family's 0.175, 0.087 and 0.051 at 20, 80 and 234."""
BATCH_FACTOR = 5.73
"""Batch in tokens over the square root of D in tokens, fitted here to the family at 234 TPP."""
MOST_WARMUP_TOKENS = 375e6
MOST_WARMUP = 0.1
"""The family warms up over 375M tokens, or a tenth of training if that is less."""
SEQUENCES_MULTIPLE = 8


@dataclass(frozen=True)
class Recipe:
    """What to train with.

    Attributes:
        params: N.
        tokens: D.
        tpp: tokens per parameter.
        tau: AdamW's averaging time over the training time.
        batch_tokens: B after rounding to whole sequences.
        sequence_length: tokens per sequence.
        global_batch_size: B in sequences.
        train_iters: steps.
        warmup_iters: steps of linear warm-up.
        lr: peak learning rate.
        weight_decay: B / (eta tau D).
        notes: where the numbers come from.
    """

    params: float
    tokens: float
    tpp: float
    tau: float
    batch_tokens: int
    sequence_length: int
    global_batch_size: int
    train_iters: int
    warmup_iters: int
    lr: float
    weight_decay: float
    notes: tuple[str, ...]

    def megatron_flags(self) -> list[str]:
        """Megatron's flags, in pairs."""
        return [
            *("--seq-length", str(self.sequence_length)),
            *("--global-batch-size", str(self.global_batch_size)),
            *("--train-iters", str(self.train_iters)),
            *("--lr", f"{self.lr:.6g}"),
            *("--min-lr", "0"),
            *("--lr-decay-style", "linear"),
            *("--lr-decay-iters", str(self.train_iters)),
            *("--lr-warmup-iters", str(self.warmup_iters)),
            *("--weight-decay", f"{self.weight_decay:.6g}"),
            *("--adam-beta1", "0.9"),
            *("--adam-beta2", "0.95"),
        ]


def tau_for(tpp: float) -> float:
    """The family's tau at so many tokens per parameter."""
    return TAU_AT_ONE * math.pow(tpp, TAU_EXPONENT)


def default_lr(params: float) -> float:
    """A peak learning rate for AdamW without muP, not below 1e-5.

    0.003239 - 0.0001395 ln N, after arXiv 2001.08361, Appendix D.6.
    """
    return max(0.003239 - 0.0001395 * math.log(params), 1e-5)


def make_recipe(
    params: float,
    tokens: float,
    *,
    lr: float | None = None,
    batch_tokens: float | None = None,
    sequence_length: int = 2048,
) -> Recipe:
    """Work out the settings.

    Args:
        params: N.
        tokens: D.
        lr: peak learning rate as the optimizer sees it; None for `default_lr`.
        batch_tokens: B; None for the family's.
        sequence_length: tokens per sequence.

    Raises:
        UsageError: A number is not positive, or D is less than one batch.
    """
    given = {"--params": params, "--tokens": tokens, "--seq-length": sequence_length}
    given |= {"--lr": 1.0 if lr is None else lr}
    given |= {"--batch-tokens": 1.0 if batch_tokens is None else batch_tokens}
    for flag, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{flag} {value} is not a positive number")
    tpp = tokens / params
    tau = tau_for(tpp)
    wanted = BATCH_FACTOR * math.sqrt(tokens) if batch_tokens is None else batch_tokens
    sequences = wanted / sequence_length
    multiple = SEQUENCES_MULTIPLE if batch_tokens is None and sequences > SEQUENCES_MULTIPLE else 1
    size = max(round(sequences / multiple), 1) * multiple
    batch = size * sequence_length
    iterations = round(tokens / batch)
    if iterations < 1:
        raise UsageError(f"--tokens {tokens:g} is less than one batch of {batch} tokens")
    warmup = min(MOST_WARMUP, MOST_WARMUP_TOKENS / tokens)
    peak = default_lr(params) if lr is None else lr
    notes = [
        f"tau = {TAU_AT_ONE} TPP^{TAU_EXPONENT}, fitted to 0.175, 0.087 and 0.051 at 20, 80 and "
        "234 TPP (arXiv 2509.25087, the family it trains)",
        "linear decay to zero, warm-up of 10% or 375M tokens, as that family",
    ]
    if not 15 <= tpp <= 300:
        notes.append(f"{tpp:.3g} TPP lie outside the 20 to 234 that tau was fitted to")
    if batch_tokens is None:
        notes.append(f"batch = {BATCH_FACTOR} sqrt(tokens), fitted to that family at 234 TPP")
    if lr is None:
        notes.append(
            "learning rate from arXiv 2001.08361, for AdamW without muP; with muP or your own "
            "give --lr, the weight decay follows"
        )
    return Recipe(
        params=params,
        tokens=tokens,
        tpp=tpp,
        tau=tau,
        batch_tokens=batch,
        sequence_length=sequence_length,
        global_batch_size=size,
        train_iters=iterations,
        warmup_iters=max(round(warmup * iterations), 1),
        lr=peak,
        # By the tokens that will be trained on, so that tau is met after rounding.
        weight_decay=1 / (peak * tau * iterations),
        notes=tuple(notes),
    )
