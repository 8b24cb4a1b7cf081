"""Objects under names of their own in a directory and behind an S3 server: written whole, listed, taken away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.schemas.errors import ConfigError, StreamUnavailableError
from anabranch.transport.object_store import ObjectStore, Place, WrongSizeError
from tests.contract.s3_server import BUCKET

PLACE = Place("the test's store", "test.store", "test.room")


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, run_name: str) -> ObjectStore:
    if request.param == "directory":
        return ObjectStore(f"file://{tmp_path}/a%20b", PLACE)
    s3 = request.getfixturevalue("s3")
    return ObjectStore(f"s3://{BUCKET}/{run_name}", PLACE, options=s3.options())


def test_objects_are_put_read_listed_and_taken_away(store: ObjectStore):
    store.make()
    assert list(store.list()) == []
    store.put("run=a/x.parquet", b"one")
    store.put("run=a/y.parquet", b"four")
    store.put("run=ab/z", b"")
    store.put("run=a/x.parquet", b"other")
    assert store.get("run=a/x.parquet") == b"other"
    assert store.get("run=a/nothing") is None
    assert {one.path: one.bytes for one in store.list("run=a")} == {"run=a/x.parquet": 5, "run=a/y.parquet": 4}
    store.delete(["run=a/x.parquet", "run=a/nothing"])
    assert {one.path for one in store.list()} == {"run=a/y.parquet", "run=ab/z"}


def test_pieces_become_one_object(store: ObjectStore):
    def pieces() -> Iterator[bytes]:
        for at in range(40):
            yield bytes([at]) * 2**18

    store.make()
    store.put("large", pieces())
    content = store.get("large", size_bytes=40 * 2**18)
    assert content == b"".join(pieces())
    with pytest.raises(WrongSizeError, match="bytes of the 3 expected"):
        store.get("large", size_bytes=3)


def test_a_put_that_is_cut_leaves_what_was_there(store: ObjectStore):
    def pieces() -> Iterator[bytes]:
        yield b"x" * 6 * 2**20
        raise OSError("the file that is copied cannot be read")

    store.make()
    store.put("name", b"before")
    with pytest.raises(StreamUnavailableError, match="cannot be read"):
        store.put("name", pieces())
    assert store.get("name") == b"before"
    assert [one.path for one in store.list()] == ["name"]


def test_a_directory_is_made_once_and_only_where_its_parent_is(tmp_path: Path):
    store = ObjectStore(f"file://{tmp_path}/there", PLACE)
    with pytest.raises(StreamUnavailableError, match=r"the test's store .* mount it, make it, or correct test\.store"):
        list(store.list())
    store.make()
    assert list(store.list()) == []
    os.rmdir(tmp_path / "there")
    with pytest.raises(StreamUnavailableError, match="does not exist"):
        store.make()
    with pytest.raises(StreamUnavailableError, match="neither does"):
        ObjectStore(f"file://{tmp_path}/mount/there", PLACE).make()


def test_messages_name_the_key_that_is_wrong():
    with pytest.raises(ConfigError, match=r"the test's store nonsense://x cannot be used: .* see test\.store"):
        ObjectStore("nonsense://x", PLACE)
