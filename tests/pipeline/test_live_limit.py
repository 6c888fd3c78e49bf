from __future__ import annotations

import pytest

from megatron_ext.pipeline.live_limit import parse_live_limit


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
