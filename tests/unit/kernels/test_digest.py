from pathlib import Path

import numpy as np
import pytest

from anabranch.kernels.digest import digest_of_sums, sums_at, tensor_digest, tensor_sums
from anabranch.kernels.workers import Workers

PAGE = Path(__file__).resolve().parents[3] / "docs" / "delta-format.md"


@pytest.mark.parametrize(
    ("bits", "digest"),
    [
        (np.array([1], np.uint8), "76b73b21927f7853c31c9d21b318f8e1"),
        (np.arange(5000, dtype=np.uint16), "bbcef4e20e31374ce6939fb822528284"),
        (np.arange(5000, dtype=np.uint32) * np.uint32(0x01000193), "bcc0db2b7a22239aadcef96afadfd8f6"),
        (np.array([2**64 - 1, 1, 2**40 + 3], np.uint64), "7ef8cd440e6e189a3f05d68f1c20e3be"),
        (np.empty((0, 4), np.uint16), "0" * 32),
    ],
)
def test_fixed_inputs_have_the_digests_they_always_had(bits: np.ndarray, digest: str) -> None:
    """They stand in manifests and in delta files, and other programs compute them by docs/delta-format.md."""
    assert tensor_digest(bits) == digest
    assert not bits.size or f"| `{digest}` |" in PAGE.read_text("utf-8")


def test_the_bytes_decide_whatever_they_are_seen_as() -> None:
    bits = np.arange(4000, dtype=np.uint64) ** 5
    assert len({tensor_digest(bits.view(t)) for t in (np.uint8, np.uint16, np.uint32, np.uint64)}) == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_a_large_array_has_one_digest_for_any_number_of_threads(dtype: type) -> None:
    bits = (
        np.arange(3 * 2**20 + 5, dtype=np.uint32).view(dtype) if dtype != np.uint64 else np.arange(2**20, dtype=dtype)
    )
    with Workers(3) as workers:
        assert tensor_sums(bits, 7, workers) == tensor_sums(bits, 7)


def test_memory_that_is_read_only_or_not_aligned_is_read_as_it_is() -> None:
    data = np.arange(4099, dtype=np.uint32).tobytes()
    views = [np.frombuffer(b"\0" * shift + data, np.uint8)[shift:].view(np.uint32) for shift in range(4)]
    assert len({tensor_sums(view, 3) for view in views}) == 1
    assert len({sums_at(np.arange(view.size), view) for view in views}) == 1


def test_places_beyond_32_bits_have_keys_of_their_own() -> None:
    one = np.ones(1, np.uint16)
    assert len({tensor_sums(one, start) for start in (0, 2**31, 2**32, 2**33, 2**45)}) == 5


@pytest.mark.parametrize("start", [0, 1, 1023])
def test_what_changed_is_told_by_one_element(start: int) -> None:
    assert sums_at(np.array([start]), np.array([5], np.uint16)) == tensor_sums(np.array([5], np.uint16), start)


def test_lanes_are_written_with_the_highest_digit_first() -> None:
    assert digest_of_sums((1, 2**64 - 1)) == "0" * 15 + "1" + "f" * 16


@pytest.mark.parametrize(
    ("bits", "start", "told"),
    [
        (np.arange(10, dtype=np.uint8)[::2], 0, "C-contiguous"),
        (np.ones(2, np.float32), 0, "not of float32"),
        (np.ones(2, np.int16), 0, "not of int16"),
        (np.ones(2, ">u2"), 0, "not of >u2"),
        (np.ones(2, np.uint8), -1, "starts at element -1"),
    ],
)
def test_what_is_no_flat_array_of_bits_is_refused(bits: np.ndarray, start: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tensor_sums(bits, start)


@pytest.mark.parametrize(
    ("indices", "told"),
    [
        (np.array([0, -1]), "element -1"),
        (np.array([0]), r"int64 \[1\] for 2 elements"),
        (np.array([0, 1], np.int32), "int32"),
    ],
)
def test_indices_that_do_not_fit_are_refused(indices: np.ndarray, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sums_at(indices, np.ones(2, np.uint16))
