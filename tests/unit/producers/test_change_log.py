"""The change log: what it gives back, what it forgets, and that it does not grow."""

from __future__ import annotations

import os

import numpy as np
import pytest

from anabranch.kernels.delta_codec import TensorChange
from anabranch.producers.change_log import ChangeLog
from anabranch.producers.mirror_memory import LOG_SLOTS, PAGE, MirrorMemory
from anabranch.schemas.layout import Layout

LAYOUT = Layout.build([("a", "bf16", (100, 100)), ("b", "f32", (50,)), ("c", "u8", (7,))])


@pytest.fixture
def memory() -> MirrorMemory:
    return MirrorMemory.make(LAYOUT, "r")


def log_of(memory: MirrorMemory, budget_bytes: int = 2**20) -> ChangeLog:
    return ChangeLog(memory, LAYOUT, budget_bytes=budget_bytes)


def at(name: str, *indices: int) -> TensorChange:
    dtype = {"a": np.uint16, "b": np.uint32, "c": np.uint8}[name]
    return TensorChange(name, np.array(indices, np.int64), np.arange(1, len(indices) + 1).astype(dtype))


def test_a_record_comes_back_as_it_was_written(memory: MirrorMemory) -> None:
    changes = [at("a", 3, 500, 9999), TensorChange("b", None, np.arange(20, dtype=np.uint32), 10), at("c", 6), at("b")]
    assert log_of(memory).append(1, changes)
    read = log_of(memory).read(1)
    assert read is not None
    for ours, theirs in zip(changes, read, strict=True):
        assert (ours.name, ours.start) == (theirs.name, theirs.start)
        assert np.array_equal(ours.bits, theirs.bits)
        assert ours.bits.dtype == theirs.bits.dtype
        if ours.indices is None:
            assert theirs.indices is None
        else:
            assert theirs.indices is not None
            assert np.array_equal(ours.indices, theirs.indices)
    assert log_of(memory).read(2) is None


def test_an_empty_record_is_a_record(memory: MirrorMemory) -> None:
    log = log_of(memory)
    log.append(1, [])
    assert log.read(1) == []
    assert log.changed_since(0, 1) == {}


def test_changes_of_several_records_are_put_together(memory: MirrorMemory) -> None:
    log = log_of(memory)
    log.append(1, [at("a", 5, 9)])
    log.append(2, [at("a", 7, 9), at("a", 800)])
    log.append(3, [TensorChange("b", None, np.zeros(50, np.uint32))])
    changed = log.changed_since(0, 2)
    assert changed is not None
    assert changed["a"] is not None
    assert changed["a"].tolist() == [5, 7, 9, 800]
    changed = log.changed_since(1, 3)
    assert changed is not None
    assert changed["a"] is not None
    assert changed["a"].tolist() == [7, 9, 800]
    assert changed["b"] is None
    assert log.changed_since(3, 3) == {}


def test_beyond_the_budget_the_oldest_go_and_so_does_their_memory(memory: MirrorMemory) -> None:
    log = log_of(memory, budget_bytes=3 * PAGE)
    for seq in range(1, 3 * LOG_SLOTS):
        log.append(seq, [at("a", *range(100))])
        log.trim()
    newest = 3 * LOG_SLOTS - 1
    assert log.changed_since(newest - 3, newest) is not None
    assert log.changed_since(newest - 4, newest) is None, "it does not guess"
    assert os.fstat(memory.descriptors[1]).st_blocks * 512 <= 4 * PAGE


def test_what_is_larger_than_the_log_is_not_taken(memory: MirrorMemory) -> None:
    log = log_of(memory)
    log.append(1, [at("a", 1)])
    room = len(memory.log)
    assert not log.append(2, [TensorChange("a", None, np.zeros(room // 2, np.uint16)) for _ in range(2)])
    assert log.read(1) is None
    assert log.append(2, [at("a", 1)])


def test_a_record_that_laps_the_end_begins_at_the_front(memory: MirrorMemory) -> None:
    log = log_of(memory)
    third = TensorChange("a", None, np.zeros(len(memory.log) // 6, np.uint16))
    for seq in range(1, 6):
        assert log.append(seq, [third])
    assert log.read(5) is not None
    assert log.read(2) is None
