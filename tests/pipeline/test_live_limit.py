from __future__ import annotations

import pytest

from megatron_ext.pipeline.live_limit import parse_live_limit, tapered


@pytest.mark.parametrize(
    ("text", "limit"),
    [("1", 1), ("12", 12), ("p", 8), ("2p", 16), ("1.5p", 12), ("1.3p", 11), (" 2p ", 16)],
)
def test_forms(text: str, limit: int) -> None:
    assert parse_live_limit(text, 8) == limit


@pytest.mark.parametrize("text", ["", "0", "0p", "-1", "1.5", "p2", "2 p", "two", "nan", "2pp"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="microbatch"):
        parse_live_limit(text, 8)


@pytest.mark.parametrize(
    ("limit", "limits"),
    [
        (1, [1, 1, 1, 1]),
        (2, [2, 2, 2, 1]),
        (3, [3, 3, 2, 1]),
        (4, [4, 3, 2, 1]),
        (8, [8, 7, 6, 5]),
    ],
)
def test_a_limit_that_falls_along_the_pipeline(limit: int, limits: list[int]) -> None:
    assert [tapered(limit, stage, 4) for stage in range(4)] == limits
    assert tapered(limit, 0, 1) == limit
