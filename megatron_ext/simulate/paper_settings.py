"""Settings and results of RRFP's evaluation (arXiv 2605.18750), as printed there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """A row of Table 1 or 2."""

    model: str
    tensor_parallel: int
    stages: int
    replicas: int
    global_batch: int
    """In sequences; the paper does not print the microbatch size, and 1 fits its buffer sweep."""
    seconds_1f1b: float
    """Per iteration."""
    seconds_bf: float
    """RRFP with its default hint, 32 microbatches in flight."""
    seconds_bfw: float
    multimodal: bool = True

    @property
    def microbatches(self) -> int:
        """Per replica."""
        return self.global_batch // self.replicas

    @property
    def layout(self) -> str:
        """As the paper writes it."""
        words = f"TP{self.tensor_parallel}/PP{self.stages}"
        return words + (f"/DP{self.replicas}" if self.replicas > 1 else "")


def _text(tp: int, pp: int, fixed: float, bf: float, bfw: float) -> Setting:
    return Setting("GPT3-Large", tp, pp, 1, 64, fixed, bf, bfw, multimodal=False)


_SMALL, _MIDDLE = "Qwen3-1.7B+ViT-H", "Qwen3-4B+ViT-Big"
_LARGE = ("LLaMA3-8B+ViT-5B", "Qwen3-32B+InternViT", "LLaMA3-70B+ViT-22B")

TABLE_1 = (
    _text(1, 8, 3.28, 2.29, 2.10),
    _text(1, 16, 2.09, 1.26, 1.18),
    _text(2, 8, 3.66, 3.03, 2.81),
    _text(2, 16, 2.34, 1.63, 1.57),
    Setting(_SMALL, 1, 8, 1, 192, 11.49, 5.98, 5.68),
    Setting(_SMALL, 1, 16, 1, 192, 9.04, 4.50, 4.33),
    Setting(_SMALL, 2, 8, 1, 192, 12.94, 7.66, 7.41),
    Setting(_SMALL, 2, 16, 1, 192, 12.54, 7.07, 6.74),
    Setting(_MIDDLE, 1, 8, 1, 192, 14.05, 7.84, 7.52),
    Setting(_MIDDLE, 1, 16, 1, 192, 11.01, 5.02, 4.81),
    Setting(_MIDDLE, 2, 8, 1, 96, 7.19, 4.45, 4.19),
    Setting(_MIDDLE, 2, 16, 1, 96, 6.29, 2.94, 2.81),
)

TABLE_2 = (
    Setting(_LARGE[0], 1, 32, 1, 64, 7.62, 3.38, 2.75),
    Setting(_LARGE[0], 2, 16, 1, 64, 8.30, 3.52, 3.04),
    Setting(_LARGE[0], 2, 8, 2, 64, 4.90, 3.02, 2.77),
    Setting(_LARGE[1], 1, 64, 1, 64, 8.03, 4.46, 4.37),
    Setting(_LARGE[1], 2, 32, 1, 64, 8.39, 5.19, 4.66),
    Setting(_LARGE[1], 2, 16, 2, 64, 5.14, 4.06, 3.74),
    Setting(_LARGE[2], 2, 64, 1, 64, 8.72, 5.16, 4.76),
    Setting(_LARGE[2], 2, 32, 2, 64, 7.23, 4.71, 4.63),
)

TABLE_3 = Setting(_MIDDLE, 1, 16, 1, 32, 2.581, 1.788, 1.788)
TABLE_3_COMPUTE = {"1F1B": 0.3328, "BF": 0.5705}
"""Part of an iteration in forwards and backwards, TP1."""

TABLE_6 = {"J1": (0.0282, 0.0181), "J2": (0.1127, 0.0682), "J3": (0.1806, 0.1136)}
"""Slowdown of 1F1B and of RRFP under injected delays; the setting is the next."""
TABLE_6_SETTING = TABLE_1[10]

TABLE_7 = {"fb": 0.0045, "b-priority": 0.0084, "f-priority": 0.0492}
"""How much longer than BF; the setting is the next."""
TABLE_7_SETTING = TABLE_1[4]

TABLE_8_STAGES = (
    (_SMALL, 1, 192, {4: 1.07, 8: 1.94, 16: 2.01}),
    (_LARGE[0], 1, 64, {8: 1.79, 16: 2.13, 32: 2.31}),
    (_MIDDLE, 2, 64, {4: 1.03, 8: 1.64, 16: 1.72}),
)
"""Model, TP, global batch, and RRFP's speedup over 1F1B by number of stages."""
TABLE_8_BATCHES = (
    (_MIDDLE, 1, 16, {64: 1.98, 128: 2.14, 192: 2.18}),
    (_LARGE[0], 2, 32, {64: 2.62, 128: 2.72, 192: 2.82}),
)
"""Model, TP, stages, and the speedup by global batch."""
