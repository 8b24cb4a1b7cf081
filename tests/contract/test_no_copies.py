"""From the received buffer to the arrays of a group nothing is copied: their addresses lie inside that buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from anabranch.schemas.envelope import open_envelope
from anabranch.schemas.trajectory import Group, decode_group, encode_group
from tests.contract.conftest import Backend
from tests.groups import entry, group, rollout

GROUP = replace(group(3), rollouts=tuple(rollout(s, tokens=100 + s) for s in range(4)), group_size=4)


def arrays(decoded: Group) -> Iterator[NDArray[np.generic]]:
    yield decoded.prompt_token_ids
    for one in decoded.rollouts:
        yield one.token_ids
        yield one.logprobs


def outside(buffer: bytes | memoryview, decoded: Group) -> list[NDArray[np.generic]]:
    whole = np.frombuffer(buffer, np.uint8)
    begin = whole.ctypes.data
    end = begin + whole.nbytes
    return [a for a in arrays(decoded) if not begin <= a.ctypes.data <= a.ctypes.data + a.nbytes <= end]


def in_the_middle(payload: bytes) -> memoryview:
    """As a parser that hands out slices of its buffer would: also at an address that is no multiple of 8."""
    return memoryview(bytearray(b"$3") + payload + b"\r\n")[2:-2].toreadonly()


@pytest.mark.parametrize("received", [bytes, memoryview, in_the_middle])
def test_arrays_lie_inside_the_payload(received: Callable[[bytes], bytes | memoryview]) -> None:
    payload = received(encode_group(GROUP))
    decoded = decode_group(payload)
    assert not outside(payload, decoded)
    assert len(list(arrays(decoded))) == 9


def test_the_check_finds_a_copy() -> None:
    payload = encode_group(GROUP)
    assert len(outside(bytearray(payload), decode_group(payload))) == 9


def test_arrays_lie_inside_what_the_stream_received(backend: Backend) -> None:
    sent = replace(entry(GROUP.group_index, 0), payload=encode_group(GROUP))
    assert backend.stream().append([sent], floor=0) == 1
    (delivery,) = backend.stream().read("learner", "c", max_entries=10, block_ms=0)
    envelope = open_envelope(delivery.fields, max_entry_bytes=1 << 20)
    assert not outside(delivery.fields[b"payload"], decode_group(envelope.payload))
