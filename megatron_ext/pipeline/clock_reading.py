"""How one rank's clock stands to that of the first rank. No PyTorch, unlike `clock`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClockReading:
    """This rank's clock, `time.perf_counter`, against that of rank 0."""

    run: str
    """A word that all ranks of this run share, and no other run."""
    host: str
    offset_s: float
    """What this rank's clock shows more than rank 0's at the same moment."""
    uncertainty_s: float
    """The offset is off by no more than this."""
