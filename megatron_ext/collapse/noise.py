"""How noisy residuals are, in the long run."""

from __future__ import annotations

import math

import numpy as np

from megatron_ext.collapse.arrays import Floats

LEAST_NOISE = 2e-4
"""Standard deviation below which a source's rounding shows, over the final loss."""
MOST_CORRELATION = 0.6
"""Autocorrelation of residuals beyond which they say nothing of noise."""
SHRINKAGE = 60
"""So many residuals more would be needed to believe their autocorrelation entirely."""


def long_run_noise(residuals: Floats) -> float:
    """Standard deviation that independent residuals of the same long-run variance would have.

    From the medians of differences between neighbours and between points three apart, which
    neither a drift nor a single step inflates. For an autocorrelation rho of first order their
    variances are as 1 to 1 + rho + rho^2; a positive rho, shrunk towards 0 where the points are
    few, makes sums grow faster and counts as more noise.

    Args:
        residuals: at least four, in order, over the final loss.
    """

    def scale(lag: int) -> float:
        return 1.4826 * float(np.median(np.abs(residuals[lag:] - residuals[:-lag]))) / math.sqrt(2)

    near, far = scale(1), scale(3)
    ratio = (far / near) ** 2 if near > 0 else 1.0
    rho = 0.5 * (math.sqrt(max(4 * ratio - 3, 0.0)) - 1) if ratio > 1 else 0.0
    rho = min(rho, MOST_CORRELATION) * residuals.size / (residuals.size + SHRINKAGE)
    # near^2 is sigma^2 (1 - rho), the long-run variance sigma^2 (1 + rho) / (1 - rho).
    return max(near * math.sqrt(1 + rho) / (1 - rho), LEAST_NOISE)
