"""The heads of a delta file's chunks are checked before anything is decoded or written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from anabranch.deploy.delta_stages import read_stages
from anabranch.kernels.delta_chunk import Piece
from anabranch.schemas.errors import DeltaError
from anabranch.transport.delta_file import DeltaFile, DeltaWriter
from tests.unit.deploy.delta_files import MemoryState, cut, states, write


def test_an_anchor_that_holds_changes_is_refused(tmp_path: Path) -> None:
    (new,) = states(1)
    zero = MemoryState([np.zeros_like(t) for t in new.tensors])
    one = MemoryState([np.ones_like(t) for t in new.tensors])
    path = write(tmp_path / "d", [(zero, one, cut(5000))], base=None)
    with DeltaFile(path) as delta:
        sparse_chunks = [n for n in delta.stage(0) if delta.chunk(n)[0] >> 4 == 1]
        assert sparse_chunks, "everything stepped by one: sparse is smaller"
        with pytest.raises(DeltaError, match="no base for them"):
            read_stages([delta])


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    old, new = states(2)
    jobs = [(Piece(0, 0, 500),), (Piece(0, 499, 900),)]
    with DeltaFile(write(tmp_path / "d", [(old, new, jobs)])) as delta, pytest.raises(DeltaError, match="both hold"):
        read_stages([delta])


def test_another_codec_is_refused(tmp_path: Path) -> None:
    old, new = states(2)
    path = write(tmp_path / "d", [(old, new, cut(64))], codec="class-golomb/2")
    with DeltaFile(path) as delta, pytest.raises(DeltaError, match="class-golomb/2"):
        read_stages([delta])


def test_a_damaged_chunk_is_refused_before_anything_is_decoded(tmp_path: Path) -> None:
    old, new = states(2)
    path = write(tmp_path / "d", [(old, new, cut(5000))])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with DeltaFile(path) as delta, pytest.raises(DeltaError, match="damaged"):
        read_stages([delta])


def test_what_each_chunk_holds(tmp_path: Path) -> None:
    a, b, c = states(3, share=0.5)
    with DeltaFile(write(tmp_path / "d", [(a, b, cut(100)), (b, b, cut(64)), (b, c, cut(2000))])) as delta:
        first, last = read_stages([delta])
        assert (first.first, last.first) == (0, len(first.owned))
        assert len(first.owned) + len(last.owned) == len(delta.header.manifest.chunks)
        assert last.content(0) == delta.chunk(last.first)
        assert int(last.owned.elements.sum()) <= 1650


@pytest.mark.parametrize("left_out", [0, 1, -1])
def test_an_anchor_that_leaves_something_out_is_refused(tmp_path: Path, left_out: int) -> None:
    (state,) = states(1)
    path = write(tmp_path / "d", [(None, state, cut(300))])
    with DeltaFile(path) as delta:
        read_stages([delta])
        header, chunks = delta.header, [delta.chunk(n) for n in delta.stage(0)]
    del chunks[left_out]
    with DeltaWriter(path) as writer:
        writer.add(chunks)
        manifest = header.manifest.model_copy(update={"chunks": tuple(writer.chunks)})
        writer.finish(dataclasses.replace(header, manifest=manifest, stages=(len(chunks),)))
    with DeltaFile(path) as delta, pytest.raises(DeltaError, match="anchor of 1650 elements, but its chunks hold"):
        read_stages([delta])
