"""How task times vary: laws for random factors, parsed from ``--jitter``.

Several laws combine with ``+``, such as ``lognormal:0.3+slow-nodes:0.01,2``. Every factor has mean
1, but those of slow nodes and links, and the delays of the RRFP paper, which only add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.jitter import LEVELS, JitterConfig

Array = NDArray[np.float64]

_FORMS = (
    "lognormal:SIGMA, pareto:ALPHA, lengths:SIGMA, slow-nodes:FRACTION,FACTOR, "
    "slow-links:FRACTION,FACTOR, messages:SIGMA, paper:P,BASE_MS,ALPHA or J0 to J3"
)


@dataclass(frozen=True)
class Slow:
    """Some nodes or links are slower, all the time."""

    fraction: float = 0.0
    """Chance that one is."""
    factor: float = 1.0
    """How many times as long it takes."""

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        """A factor for each of `count`."""
        slow = generator.random(count) < self.fraction
        return np.where(slow, self.factor, 1.0)


@dataclass(frozen=True)
class JitterLaw:
    """Every source of variation."""

    sigma: float = 0.0
    """Lognormal, for every task on its own."""
    tail: float = math.inf
    """Pareto exponent, for every task on its own: the smaller, the heavier the tail; above 1."""
    lengths: float = 0.0
    """Lognormal sigma over microbatches, the same on all stages: sequences differ in length."""
    messages: float = 0.0
    """Lognormal sigma of every message's latency; a late one does not hold up those behind it."""
    slow_nodes: Slow = field(default_factory=Slow)
    slow_links: Slow = field(default_factory=Slow)
    delays: JitterConfig | None = None
    """Delays of RRFP's evaluation; they take the unit of time for a millisecond."""

    @staticmethod
    def parse(text: str) -> JitterLaw:
        """Read laws joined by ``+``; ``none`` is none.

        Raises:
            UsageError: One is unknown, or its numbers are out of range.
        """
        found: dict[str, object] = {}
        for part in text.split("+"):
            name, _, numbers = part.strip().partition(":")
            try:
                found |= _parse_one(name, numbers)
            except ValueError as error:
                raise UsageError(f"--jitter {part.strip()}: {error}") from None
        return JitterLaw(**found)  # type: ignore[arg-type]

    def factors(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Independent factors of mean 1 for the tasks of one kind."""
        if self.sigma:
            drawn = generator.lognormal(-(self.sigma**2) / 2, self.sigma, shape)
        else:
            drawn = np.ones(shape)
        if self.tail < math.inf:
            drawn *= (1 + generator.pareto(self.tail, shape)) * (self.tail - 1) / self.tail
        return drawn

    def length_factors(self, generator: np.random.Generator, microbatches: int) -> Array:
        """A factor of mean 1 for every microbatch."""
        if not self.lengths:
            return np.ones(microbatches)
        return generator.lognormal(-(self.lengths**2) / 2, self.lengths, microbatches)


def _parse_one(name: str, numbers: str) -> dict[str, object]:
    """The fields that one law sets."""
    if name in ("", "none"):
        return {}
    if name in LEVELS:
        return {"delays": LEVELS[name]}
    if name == "paper":
        return {"delays": JitterConfig.parse(numbers)}
    try:
        values = [float(word) for word in numbers.split(",")]
    except ValueError:
        values = []
    if name in ("slow-nodes", "slow-links") and len(values) == 2:
        fraction, factor = values
        if not (0 <= fraction <= 1 and 1 <= factor < math.inf):
            raise ValueError("the fraction is from 0 to 1, and the factor is at least 1")
        return {name.replace("-", "_"): Slow(fraction, factor)}
    if len(values) == 1:
        (value,) = values
        if name in ("lognormal", "lengths", "messages"):
            if not 0 <= value < math.inf:
                raise ValueError("sigma is finite and not negative")
            return {"sigma" if name == "lognormal" else name: value}
        if name == "pareto":
            if not 1 < value < math.inf:
                raise ValueError("the exponent is above 1, or the mean would be infinite")
            return {"tail": value}
    raise ValueError(f"it is none of {_FORMS}, joined by +")
