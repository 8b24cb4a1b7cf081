"""A step pair: what is read of it, and that a bad one is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anabranch.deploy.codec_pair import load_pair
from anabranch.schemas.errors import DeltaError, UsageError
from tests.unit.deploy.step_pairs import CHANGED, base_tensors, change_tensors, write, write_pair


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path)


def test_a_pair_of_several_widths(prefix: str) -> None:
    pair = load_pair(prefix)
    assert pair.name == "step.1"
    assert [t.dtype for t in pair.layout.tensors] == ["f32", "bf16", "f8_e4m3", "f16"]
    assert pair.changed_elements() == CHANGED, "400 + 2; one entry repeats what was there"
    assert pair.new["a.index"][[0, 39]].tolist() == [0x7FC00001, 0x80000000]
    assert np.array_equal(pair.new["a.index"][1:39], base_tensors()["a.index"][2][1:39])
    assert np.array_equal(pair.new["quiet"], pair.base["quiet"])
    assert not np.shares_memory(pair.new["quiet"], pair.base["quiet"])
    assert pair.dense_bytes == 200_000 + 160 + 64 + 2


def test_indices_may_be_64_bits_wide(prefix: str) -> None:
    changes = change_tensors()
    at = changes["b.weight.index"][2]
    changes["b.weight.index"] = ("U64", [at.size], at.astype(np.uint64))
    write(Path(prefix + ".change.safetensors"), changes)
    assert load_pair(prefix).changed_elements() == CHANGED


U32 = np.uint32
BAD = {
    "a change of a tensor that is not there": ({"c.index": ("U32", [0], np.array([], U32))}, "'c.index' changes a tensor"),
    "an entry of neither kind": ({"b.weight": ("U32", [0], np.array([], U32))}, "'b.weight' is neither"),
    "an index alone": ({"quiet.index": ("U32", [0], np.array([], U32))}, "'quiet' has no quiet.bits"),
    "bits alone": ({"quiet.bits": ("U8", [0], np.array([], np.uint8))}, "'quiet' has no quiet.index"),
    "an index past the end": ({"a.index.index": ("U32", [2], np.array([0, 40], U32))}, "index 40 is outside of its 40"),
    "a negative index": ({"a.index.index": ("I32", [2], np.array([-1, 3], np.int32))}, "index -1 is outside"),
    "indices that do not ascend": ({"a.index.index": ("U32", [2], np.array([3, 3], U32))}, "do not ascend"),
    "an index of floats": ({"a.index.index": ("F32", [2], np.zeros(2, np.float32))}, "its index is F32"),
    "lists of different length": ({"a.index.index": ("U32", [1], np.array([3], U32))}, "not two lists as long"),
    "bits of another width": ({"a.index.bits": ("U16", [2], np.zeros(2, np.uint16))}, "the base's are 32 bits wide"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_change_file_is_refused_by_name(prefix: str, what: str) -> None:
    entries, told = BAD[what]
    write(Path(prefix + ".change.safetensors"), change_tensors() | entries)
    with pytest.raises(DeltaError, match=told) as error:
        load_pair(prefix)
    assert "step.1.change.safetensors" in str(error.value)


def test_a_base_of_an_unknown_dtype_is_refused(prefix: str) -> None:
    write(Path(prefix + ".base.safetensors"), base_tensors() | {"odd": ("U16", [1], np.array([1], np.uint16))})
    with pytest.raises(DeltaError, match=r"base\.safetensors: tensor 'odd' has dtype U16; known: BF16"):
        load_pair(prefix)


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x10\x00\x00\x00\x00\x00\x00\x00{}"])
@pytest.mark.parametrize("half", ["base", "change"])
def test_a_damaged_file_is_refused(prefix: str, half: str, content: bytes) -> None:
    Path(f"{prefix}.{half}.safetensors").write_bytes(content)
    with pytest.raises(DeltaError, match=rf"step.1.{half}.safetensors is no safetensors file"):
        load_pair(prefix)


def test_a_folder_for_a_file_is_a_usage_error(prefix: str) -> None:
    Path(prefix + ".base.safetensors").unlink()
    Path(prefix + ".base.safetensors").mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        load_pair(prefix)
