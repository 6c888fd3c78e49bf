"""The paper's parametric curve (arXiv 2509.25087, Eq. 4 and 5).

f(t) = ((1 + e1) / (t + e1))^m + b (eta(t) + e2)^q and l(t) = f(t) / f(1), where eta is the
learning rate over its peak. m, e1 and e2 are fixed; b and q are free per curve, or follow
b = b_c tau^b_e and q = q_c TPP^q_e over a family. The paper does not publish these four.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ext.collapse.arrays import Floats
from megatron_ext.collapse.schedule import Schedule

M = 0.05
EPSILON_TIME = 0.001
EPSILON_RATE = 0.1


@dataclass(frozen=True)
class Form:
    """One curve of the form.

    Attributes:
        b: weight of the learning-rate term.
        q: its exponent.
        m: exponent of the power law in time.
        e1: offset in time.
        e2: offset of the learning rate.
    """

    b: float
    q: float
    m: float = M
    e1: float = EPSILON_TIME
    e2: float = EPSILON_RATE

    def at(self, t: Floats, schedule: Schedule) -> Floats:
        """Normalised loss at fractions `t` of training, 1 at t = 1."""
        value = self._unnormalised(t, schedule.at(t))
        end = np.ones(1)
        return np.asarray(value / self._unnormalised(end, schedule.at(end)))

    def _unnormalised(self, t: Floats, eta: Floats) -> Floats:
        power = ((1 + self.e1) / (np.maximum(t, 0.0) + self.e1)) ** self.m
        return np.asarray(power + self.b * (eta + self.e2) ** self.q)


@dataclass(frozen=True)
class FamilyForm:
    """The form over a family of runs.

    Attributes:
        b_c: b at tau = 1.
        b_e: exponent of tau in b.
        q_c: q at TPP = 1.
        q_e: exponent of TPP in q.
    """

    b_c: float
    b_e: float
    q_c: float
    q_e: float

    def curve(self, tau: float, tpp: float) -> Form:
        """The curve of a run with this tau and TPP."""
        return Form(b=self.b_c * tau**self.b_e, q=self.q_c * tpp**self.q_e)
