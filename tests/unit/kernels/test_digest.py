import numpy as np
import pytest
import xxhash

from anabranch.kernels.digest import tensor_digest


def test_an_array_and_its_bytes_have_the_same_digest() -> None:
    array = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert tensor_digest(array) == tensor_digest(array.tobytes()) == tensor_digest(memoryview(array.tobytes()))


def test_it_is_xxh3_128_of_the_little_endian_bytes() -> None:
    assert tensor_digest(np.array([1, 258], dtype="<u2")) == xxhash.xxh3_128_hexdigest(b"\x01\x00\x02\x01")


def test_one_flipped_bit_changes_it() -> None:
    array = np.zeros(1000, np.uint8)
    before = tensor_digest(array)
    array[999] ^= 1
    assert tensor_digest(array) != before


def test_a_strided_array_is_refused() -> None:
    with pytest.raises(ValueError, match="C-contiguous"):
        tensor_digest(np.arange(10)[::2])


def test_an_empty_tensor_has_a_digest() -> None:
    assert tensor_digest(np.empty((0, 4), np.uint16)) == tensor_digest(b"")
