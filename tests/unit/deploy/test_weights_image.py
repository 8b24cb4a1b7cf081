from __future__ import annotations

import numpy as np
import pytest

from anabranch.deploy.weights_image import Image
from anabranch.kernels.delta_codec import encode_anchor, encode_delta
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError
from tests.unit.deploy.weights_channels import LAYOUT, digest_of, first_state, stepped


@pytest.fixture
def workers():
    with Workers(2) as made:
        yield made


def test_the_digest_follows_the_bits_through_anchors_and_deltas(workers):
    image, states = Image(LAYOUT), [first_state()]
    assert image.digest == digest_of({name: np.zeros_like(bits) for name, bits in states[0].items()})
    image.load(encode_anchor(LAYOUT, states[0]).chunks)
    assert image.digest == digest_of(states[0])
    for share in (0.001, 0.02, 0.9, 0.0):  # sparse, denser, dense, nothing
        states.append(stepped(states[-1], len(states), share))
        digest, changes = image.check(encode_delta(LAYOUT, states[-2], states[-1]).chunks, workers)
        assert digest == digest_of(states[-1])
        assert image.digest == digest_of(states[-2])  # nothing applied yet
        image.apply(changes)
        assert image.digest == digest_of(image.bits) == digest_of(states[-1])
    image.compare(encode_anchor(LAYOUT, states[-1]).chunks)
    image.load(encode_anchor(LAYOUT, states[0]).chunks)  # over whatever was there
    assert image.digest == digest_of(image.bits) == digest_of(states[0])


def test_another_state_does_not_compare(workers):
    image, state = Image(LAYOUT), first_state()
    image.load(encode_anchor(LAYOUT, state).chunks)
    other = {name: bits.copy() for name, bits in state.items()}
    other["c"][99] ^= 1
    with pytest.raises(DeltaError, match="other values of 'c'"):
        image.compare(encode_anchor(LAYOUT, other).chunks)


@pytest.mark.parametrize("use", ["load", "compare"])
def test_only_a_full_snapshot_is_an_anchor(use):
    image, state = Image(LAYOUT), first_state()
    chunks = encode_anchor(LAYOUT, state).chunks
    image.load(chunks)
    with pytest.raises(DeltaError, match="not a full snapshot"):
        getattr(image, use)(chunks[1:])
    with pytest.raises(DeltaError, match="two chunks hold"):
        getattr(image, use)((*chunks, chunks[0]))
    sparse = encode_delta(LAYOUT, state, stepped(state, 1)).chunks[0]
    with pytest.raises(DeltaError, match="chunk 0 is refused: it is a change, not values"):
        getattr(image, use)([sparse, *chunks])


def test_after_a_failed_load_the_digest_is_still_that_of_the_bits():
    image = Image(LAYOUT)
    chunks = encode_anchor(LAYOUT, first_state()).chunks
    with pytest.raises(DeltaError):
        image.load([chunks[0], chunks[1][:-1]])
    assert image.digest == digest_of(image.bits)
