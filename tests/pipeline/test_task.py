from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.pipeline.task import HEADER_BYTES, Direction, Header, HeaderError

headers = st.builds(
    Header,
    batch=st.integers(0, 2**32 - 1),
    direction=st.sampled_from(Direction),
    microbatch=st.integers(0, 2**32 - 1),
    chunk=st.integers(0, 255),
    dtype=st.integers(0, 255),
    shape=st.lists(st.integers(1, 2**64 - 1), max_size=8).map(tuple),
)


@given(headers)
def test_round_trip(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(HeaderError):
        Header.unpack(data)


@given(headers, st.integers(0, 7), st.integers(1, 255))
def test_a_changed_start_is_refused_or_read_as_another_header(
    header: Header, position: int, change: int
) -> None:
    packed = bytearray(header.pack())
    packed[position] ^= change
    try:
        assert Header.unpack(bytes(packed)) != header
    except HeaderError:
        pass
    else:
        assert position > 3, "another protocol version was accepted"


def test_a_pickle_is_not_loaded() -> None:
    with pytest.raises(HeaderError, match="starts with"):
        Header.unpack(pickle.dumps(list(range(200))))
