"""Commands are packed to the bytes that redis-py packs them to, and large values are not copied."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import Encoder, PythonRespSerializer
from redis.exceptions import DataError

from anabranch.transport.resp_packer import LARGE, RespPacker

THEIRS = PythonRespSerializer(LARGE, Encoder("utf-8", "strict", False).encode)
NAMES = st.sampled_from(["XADD", "XGROUP CREATE", b"PING", b"CONFIG GET"])
ARGS = st.one_of(
    st.text(max_size=20), st.binary(max_size=20), st.integers(), st.floats(),
    st.binary(max_size=20).map(memoryview), st.binary(max_size=20).map(bytearray),
    st.integers(LARGE - 1, LARGE + 1).map(bytes), st.integers(LARGE - 1, LARGE + 1).map("é".__mul__),
)  # fmt: skip


@given(NAMES, st.lists(ARGS, max_size=8))
def test_the_bytes_are_those_of_redis_py(name: str | bytes, args: list[Any]) -> None:
    assert b"".join(RespPacker().pack(name, *args)) == b"".join(THEIRS.pack(name, *args))


@pytest.mark.parametrize("value", [bytes(LARGE + 1), memoryview(b"short"), memoryview(bytes(LARGE + 1))])
def test_large_values_and_views_are_not_copied(value: bytes | memoryview) -> None:
    assert any(piece is value for piece in RespPacker().pack("SET", "key", value, "EX", 1))


@pytest.mark.parametrize("value", [None, True, [1]])
def test_what_is_no_argument_is_refused_as_by_redis_py(value: object) -> None:
    with pytest.raises(DataError, match="Invalid input of type"):
        RespPacker().pack("SET", "key", value)
