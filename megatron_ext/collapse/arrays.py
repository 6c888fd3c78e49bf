"""The array type that all of this package computes with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

type Floats = npt.NDArray[np.float64]
"""A one-dimensional array of float64 unless said otherwise."""
type Truths = npt.NDArray[np.bool_]
"""A one-dimensional array of booleans."""
