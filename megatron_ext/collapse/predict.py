"""Which of some unfinished runs to stop: predicted final losses, ranked, and the regret."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from megatron_ext.collapse.check import CheckResult

STOP_BELOW = 0.05
"""A run is stopped if it turns out the best with less than this probability."""
DRAWS = 20_000


@dataclass(frozen=True)
class Candidate:
    """One run among those compared.

    Attributes:
        run: its source.
        rank: 1 is the lowest predicted final loss; None if nothing could be predicted.
        fraction: how far it has come.
        predicted_final_loss: nats per token.
        interval: 95% interval of it.
        provisional: whether too little was seen to rely on it.
        best_probability: chance that it ends lowest of all.
        stop: whether to stop it now.
        regret: expected loss given up by stopping it, in nats per token: how much lower than the
            first of the ranking it may still end, on average over all outcomes.
        regret_if_wrong: the same if it does end lower.
        reasons: why nothing could be predicted.
        alarms: number of alarms it has had.
    """

    run: str
    rank: int | None
    fraction: float
    predicted_final_loss: float | None
    interval: tuple[float, float] | None
    provisional: bool
    best_probability: float | None
    stop: bool
    regret: float | None
    regret_if_wrong: float | None
    reasons: tuple[str, ...] = ()
    alarms: int = 0

    def to_json(self) -> dict[str, Any]:
        """The candidate for JSON."""
        fields = asdict(self)
        fields["interval"] = None if self.interval is None else list(self.interval)
        fields["reasons"] = list(self.reasons)
        return fields


def rank(results: Sequence[CheckResult]) -> list[Candidate]:
    """Rank runs by predicted final loss and say which to stop.

    Errors count as independent and normal. A provisional prediction stops no run.
    """
    known = [each for each in results if each.predicted_final_loss is not None and each.interval]
    known.sort(key=lambda each: each.predicted_final_loss or math.inf)
    means = np.array([each.predicted_final_loss for each in known], dtype=np.float64)
    errors = np.array([_error(each) for each in known])
    chances = _chances(means, errors)
    candidates = []
    for place, each in enumerate(known):
        gap, spread = float(means[place] - means[0]), math.hypot(errors[place], errors[0])
        # E[max(X, 0)] of the gain X that stopping gives up, normal around -gap.
        z = -gap / spread if spread else -math.inf
        regret = spread * float(norm.pdf(z)) - gap * float(norm.cdf(z)) if spread else 0.0
        wrong = float(norm.cdf(z)) if spread else 0.0
        unfinished = each.final_loss is None
        is_settled = not each.provisional and not known[0].provisional
        unlikely = bool(chances[place] < STOP_BELOW)
        stop = place > 0 and unfinished and is_settled and unlikely
        candidates.append(
            Candidate(
                run=each.run,
                rank=place + 1,
                fraction=each.fraction,
                predicted_final_loss=each.predicted_final_loss,
                interval=each.interval,
                provisional=each.provisional,
                best_probability=float(chances[place]),
                stop=stop,
                regret=0.0 if place == 0 else max(regret, 0.0),
                regret_if_wrong=regret / wrong if place and wrong > 1e-12 else 0.0,
                alarms=len(each.alarms),
            )
        )
    for each in results:
        if each not in known:
            candidates.append(
                Candidate(
                    each.run,
                    None,
                    each.fraction,
                    None,
                    None,
                    False,
                    None,
                    False,
                    None,
                    None,
                    each.reasons or ("nothing seen yet that could be aligned",),
                    len(each.alarms),
                )
            )
    return candidates


def _error(result: CheckResult) -> float:
    assert result.interval is not None
    return (result.interval[1] - result.interval[0]) / (2 * 1.96)


def _chances(means: np.ndarray[Any, Any], errors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Chance of each normal to be the lowest, by drawing with a fixed seed."""
    if means.size < 2:
        return np.ones(means.size)
    draws = np.random.default_rng(0).normal(means, np.maximum(errors, 1e-12), (DRAWS, means.size))
    return np.bincount(draws.argmin(axis=1), minlength=means.size) / DRAWS
