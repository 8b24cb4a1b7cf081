"""Payloads with a few bytes changed: the codec takes what Arrow's reader of streams and the reference take, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from anabranch.schemas.errors import WireError
from anabranch.schemas.trajectory import Group, decode_group, encode_group, read_batch
from anabranch.schemas.trajectory_batch import read_any
from anabranch.schemas.trajectory_frame import BODY, SCHEMA_MESSAGE, find_frame
from anabranch.schemas.trajectory_reference import group_of_batch
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from tests.groups import fields_of, group, rollout

TWO_SPANS = (VersionSpan(PolicyVersion(1, 3), 0), VersionSpan(PolicyVersion(1, 4), 1))
GROUPS = [
    group(1),
    replace(group(2), rollouts=(replace(rollout(), text="ünï"),), group_size=3),
    replace(group(3), rollouts=tuple(rollout(s, tokens=3 + s, spans=TWO_SPANS[: 1 + s % 2]) for s in range(3)), group_size=3),
]  # fmt: skip
HEAD = len(SCHEMA_MESSAGE)
Mutate = Callable[[random.Random, bytearray], None]


def outcome(act: Callable[[], Group]) -> object:
    try:
        return fields_of(act())
    except WireError as error:
        return type(error).__name__, str(error)


def any_byte(rng: random.Random, payload: bytearray) -> None:
    payload[rng.randrange(len(payload))] = rng.randrange(256)


def framing(rng: random.Random, payload: bytearray) -> None:
    payload[rng.randrange(HEAD, BODY)] = rng.choice([0, 1, 2, 4, 8, 0x7F, 0x80, 0xFF, rng.randrange(256)])


def one_bit(rng: random.Random, payload: bytearray) -> None:
    payload[rng.randrange(HEAD, len(payload))] ^= 1 << rng.randrange(8)


def one_number(rng: random.Random, payload: bytearray) -> None:
    at = rng.randrange(BODY // 4, len(payload) // 4) * 4
    payload[at : at + 4] = rng.choice([0, 1, 2, 2**31 - 1, 2**32 - 1, 0x7FC00000, 0xFF800000]).to_bytes(4, "little")


def length(rng: random.Random, payload: bytearray) -> None:
    if payload and rng.randrange(2):
        del payload[rng.randrange(len(payload)) :]
    else:
        payload += bytes(rng.randrange(256) for _ in range(rng.randrange(1, 17)))


@pytest.mark.parametrize("mutate", [any_byte, framing, one_bit, one_number, length], ids=lambda f: f.__name__)
def test_what_is_broken_is_taken_or_refused_as_by_arrow_and_the_reference(mutate: Mutate) -> None:
    rng = random.Random(mutate.__name__)
    seen = set()
    for _ in range(1_500):
        payload = bytearray(encode_group(rng.choice(GROUPS)))
        for _ in range(rng.randrange(1, 3)):
            mutate(rng, payload)
        data = bytes(payload)
        found = outcome(lambda data=data: decode_group(data))  # type: ignore[misc]
        assert found == outcome(lambda data=data: group_of_batch(read_any(data)))  # type: ignore[misc]
        seen.add(isinstance(found[0], str) and "Error" in found[0])  # type: ignore[index]
    assert seen == {True, False}  # some are refused and some are not: a mutation of which all fare alike tests little


@pytest.mark.parametrize("good", GROUPS, ids=lambda g: f"{len(g.rollouts)} rollouts")
def test_a_frame_is_every_byte_of_the_message(good: Group) -> None:
    """Another byte there is for Arrow to judge, whatever it means, or else it tells another size."""
    payload = encode_group(good)
    frame = find_frame(payload)
    assert frame is not None
    for at in range(BODY):
        found = find_frame(payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])
        assert found is None or found.sizes != frame.sizes


@pytest.mark.parametrize("value", [-1, 2**31, 2**53, 2**62, 2**63 - 1])
def test_a_size_that_cannot_be_is_no_frame(value: int) -> None:
    """Nor do products overflow on the way to say so."""
    payload = encode_group(group(1))
    words = np.frombuffer(payload, np.int64, (BODY - HEAD) // 8, HEAD)
    for at in np.flatnonzero(words < 2**20).tolist():
        broken = words.copy()
        broken[at] = value
        assert find_frame(payload[:HEAD] + broken.tobytes() + payload[BODY:]) is None


def test_a_batch_is_read_as_by_arrow() -> None:
    for good in GROUPS:
        payload = encode_group(good)
        assert read_batch(payload).equals(read_any(payload))
