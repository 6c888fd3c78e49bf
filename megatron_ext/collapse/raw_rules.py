"""Rules on the raw loss, as other tools have them: to compare with, not to rely on."""

from __future__ import annotations

import numpy as np

from megatron_ext.collapse.arrays import Floats

WINDOW = 128
LEAST = 64
"""As OLMo-core's SkipStepOptimizer: 6 sigma of the last 128 losses, from 64 on."""
SIGMAS = 6.0
FACTOR, PATIENCE, LEAST_WINDOW = 2.0, 5, 10
"""As LLM Foundry's KillLossSpike: twice the mean of a window, five times in a row."""


def first_raw_alarm(t: Floats, losses: Floats) -> dict[str, float | None]:
    """When each of the two rules first rings, as a fraction of training; None if never.

    A run with fewer points than a rule waits for is given half of what it has as its window.

    Args:
        t: fractions of training.
        losses: nats per token.
    """
    sigma_at: float | None = None
    factor_at: float | None = None
    window = min(WINDOW, max(losses.size // 2, LEAST_WINDOW))
    least = min(LEAST, window // 2)
    high = 0
    for place in range(least, losses.size):
        recent = losses[max(place - window, 0) : place]
        if sigma_at is None and losses[place] > recent.mean() + SIGMAS * recent.std():
            sigma_at = float(t[place])
        high = high + 1 if losses[place] >= FACTOR * float(np.mean(recent)) else 0
        if factor_at is None and high >= PATIENCE:
            factor_at = float(t[place])
    return {"six_sigma": sigma_at, "twice_the_mean": factor_at}
