"""What an alarm says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

KINDS = ("departure", "spike", "divergence", "nan", "infinity")
"""departure: sustained, over the reference; the others need no reference."""


@dataclass(frozen=True)
class Alarm:
    """Something went wrong.

    Attributes:
        t: fraction of training at which the alarm rang.
        step: step at which it rang.
        kind: one of `KINDS`.
        size: how far the loss is off, over the final loss (0.01 is 1%); for a departure the mean
            since it began; infinite for NaN and infinity.
        confidence: one minus the chance of such a ring in a healthy run.
        started_t: fraction of training at which the departure began, as estimated.
        started_step: the step at which it began.
        nearby: what happened around the start: restarts, jumps of the learning rate, ...
    """

    t: float
    step: int
    kind: str
    size: float
    confidence: float
    started_t: float
    started_step: int
    nearby: tuple[str, ...] = ()

    def with_nearby(self, nearby: tuple[str, ...]) -> Alarm:
        """This alarm with what happened around its start."""
        return replace(self, nearby=nearby)

    def to_json(self) -> dict[str, Any]:
        """The alarm for JSON; an infinite size becomes null."""
        fields = asdict(self)
        fields["nearby"] = list(self.nearby)
        if not self.size < float("inf"):
            fields["size"] = None
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Alarm:
        """The alarm that `to_json` wrote."""
        size = fields["size"]
        return cls(
            **{
                **fields,
                "size": float("inf") if size is None else size,
                "nearby": tuple(fields["nearby"]),
            }
        )

    def __str__(self) -> str:
        size = f", {self.size:+.2%} of the final loss" if self.size < float("inf") else ""
        near = f"; near: {', '.join(self.nearby)}" if self.nearby else ""
        return (
            f"{self.kind} at step {self.step} (t = {self.t:.3f}), began near step "
            f"{self.started_step}{size}, confidence {self.confidence:.4f}{near}"
        )
