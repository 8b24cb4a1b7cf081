"""Delta files on disk: whole or absent, and no byte of them is trusted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.schemas.delta_file import PREFIX, DeltaHeader
from anabranch.schemas.errors import DeltaError, ManifestError, TemporaryError, UsageError
from anabranch.schemas.manifest import Chunk
from anabranch.transport.delta_file import DeltaFile, DeltaWriter
from tests.limits import file_size_limit
from tests.unit.schemas.test_delta_file import header

CHUNKS = (b"first chunk", b"", b"third")


def make(chunks: Sequence[Chunk]) -> DeltaHeader:
    return header(chunks=tuple(chunks), stages=(2, 1))


def written(path: Path) -> Path:
    with DeltaWriter(path) as writer:
        writer.add(CHUNKS[:1])
        writer.add(CHUNKS[1:])
        assert writer.finish(make(writer.chunks)) == path.stat().st_size
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with DeltaFile(written(tmp_path / "d")) as delta:
        assert [delta.chunk(i) for i in range(3)] == list(CHUNKS)
        assert (list(delta.stage(0)), list(delta.stage(1))) == ([0, 1], [2])
        assert delta.header == make(delta.header.manifest.chunks)
        assert delta.size_bytes == delta.header_bytes + sum(map(len, CHUNKS))
    assert os.listdir(tmp_path) == ["d"]


def test_the_same_content_is_the_same_file(tmp_path: Path) -> None:
    assert written(tmp_path / "a").read_bytes() == written(tmp_path / "b").read_bytes()


def read_all(path: Path) -> Any:
    with DeltaFile(path) as delta:
        return delta.header, [delta.chunk(i) for i in range(len(delta.header.manifest.chunks))]


def test_every_flipped_byte_and_every_length_is_found(tmp_path: Path) -> None:
    whole = written(tmp_path / "d").read_bytes()
    other = tmp_path / "damaged"
    for position in range(len(whole)):
        other.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises((DeltaError, ManifestError), match="damaged"):
            read_all(other)
    for cut in range(len(whole)):
        other.write_bytes(whole[:cut])
        with pytest.raises((DeltaError, ManifestError), match="damaged"):
            read_all(other)
    other.write_bytes(whole + b"x")
    with pytest.raises(DeltaError, match="bytes, it has"):
        read_all(other)


def test_a_header_that_is_larger_than_the_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    whole = written(tmp_path / "d").read_bytes()
    (tmp_path / "d").write_bytes(whole[:8] + b"\xff\xff\xff\xff" + whole[12:])
    with pytest.raises(DeltaError, match="cut short"):
        DeltaFile(tmp_path / "d")
    (tmp_path / "d").write_bytes(whole[: PREFIX.size])
    with pytest.raises(DeltaError, match="cut short"):
        DeltaFile(tmp_path / "d")


def test_no_descriptor_is_left_open_by_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"something else")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(DeltaError):
            DeltaFile(tmp_path / "d")
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_left_when_it_does_not_come_to_an_end(tmp_path: Path) -> None:
    def interrupted() -> None:
        with DeltaWriter(tmp_path / "d") as writer:
            writer.add(CHUNKS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def fill(size_bytes: int) -> None:
        with file_size_limit(size_bytes), DeltaWriter(tmp_path / "d") as writer:
            writer.add([bytes(30_000)])
            writer.finish(header(chunks=tuple(writer.chunks), stages=(1,)))

    for size_bytes in (0, 20_000, 30_000):  # in the spool; in the file itself
        with pytest.raises(OSError, match="File too large"):
            fill(size_bytes)
        assert os.listdir(tmp_path) == []


def test_only_a_delta_file_is_replaced(tmp_path: Path) -> None:
    written(written(tmp_path / "d"))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UsageError, match="not a delta file"):
        written(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"
    with pytest.raises(UsageError, match="folder"):
        written(tmp_path)


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    with DeltaWriter(tmp_path / "d") as writer:
        with pytest.raises(TemporaryError), DeltaWriter(tmp_path / "d"):
            pass
        writer.add(CHUNKS)
        writer.finish(make(writer.chunks))
    assert os.listdir(tmp_path) == ["d"]


@pytest.mark.timeout(20)
def test_a_pipe_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for attempt in (DeltaFile, written):
        with pytest.raises(UsageError, match="not a regular file"):
            attempt(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("d")
    written(written(tmp_path / "link"))
    assert os.readlink(tmp_path / "link") == "d"
    assert sorted(os.listdir(tmp_path)) == ["d", "link"]
