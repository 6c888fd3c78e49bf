"""Page's CUSUM, with its threshold from the rate of false alarms that the user accepts.

A one-sided sum S of what exceeds an allowance k, never below 0, rings when S > h. Of observations
that are independent and standard normal, the mean number until a false ring is, by Siegmund's
approximation (Sequential Analysis, 1985), (exp(2kb) - 1 - 2kb) / (2k^2) with b = h + 1.166. So the
chance of a false ring in n observations is about 1 - exp(-n / that number).
"""

from __future__ import annotations

import functools
import math

from scipy.optimize import brentq

OVERSHOOT = 1.166
"""Siegmund's correction for the jump over the threshold."""


def mean_time_to_ring(threshold: float, allowance: float) -> float:
    """Mean number of standard normal observations until a false ring.

    Args:
        threshold: h, in standard deviations.
        allowance: k, in standard deviations, above 0.
    """
    x = 2 * allowance * (threshold + OVERSHOOT)
    if x > 700:
        return math.inf
    return (math.expm1(x) - x) / (2 * allowance**2)


def false_alarm_probability(threshold: float, allowance: float, observations: float) -> float:
    """Chance that at least one false alarm rings in so many observations."""
    return -math.expm1(-observations / mean_time_to_ring(threshold, allowance))


@functools.lru_cache(maxsize=4096)
def threshold_for(rate: float, allowance: float, observations: float) -> float:
    """The h with which a false alarm rings in `observations` with probability `rate`.

    Args:
        rate: in (0, 1).
        allowance: k, in standard deviations, above 0.
        observations: how many there will be in all.
    """
    wanted = observations / -math.log1p(-rate)

    def excess(threshold: float) -> float:
        return math.log(mean_time_to_ring(threshold, allowance) / wanted)

    highest = 300.0 / allowance
    if excess(0.0) >= 0:
        return 0.0
    return float(brentq(excess, 0.0, highest, xtol=1e-6))
