"""What a blob store promises (transport/blob_store.py): memory, Valkey, a directory, and a real S3-compatible server."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from anabranch.schemas.config import load_config
from anabranch.schemas.errors import ConfigError, DeltaError, StreamUnavailableError
from anabranch.schemas.keys import Keys
from anabranch.transport.blob_store import BlobStore, blob_digest
from anabranch.transport.memory_blob_store import MemoryBlobStore
from anabranch.transport.object_blob_store import ObjectBlobStore, open_blob_store
from anabranch.transport.redis_blob_store import RedisBlobStore
from anabranch.transport.redis_client import connect
from tests.contract.s3_server import BUCKET


@dataclass
class Place:
    """`open` gives another handle on the same store; `write`, `read` and `remove` reach behind its back."""

    open: Callable[[], BlobStore]
    write: Callable[[str, bytes], object]
    read: Callable[[str], bytes]
    remove: Callable[[str], object]


@pytest.fixture(params=["memory", "redis", "directory", "s3"])
def place(request: pytest.FixtureRequest, keys: Keys, tmp_path: Path) -> Iterator[Place]:
    if request.param == "memory":
        one = MemoryBlobStore()
        yield Place(lambda: one, one.chunks.__setitem__, one.chunks.__getitem__, one.chunks.__delitem__)
    elif request.param == "redis":
        valkey, client = request.getfixturevalue("valkey"), request.getfixturevalue("client")
        there = connect(valkey.url, deadline_s=10, what="the test hub")
        yield Place(
            lambda: RedisBlobStore(there, keys),
            lambda digest, payload: client.set(keys.blob(digest), payload),
            lambda digest: client.get(keys.blob(digest)),
            lambda digest: client.delete(keys.blob(digest)),
        )
        there.close()
    elif request.param == "directory":
        folder = tmp_path / "a b" / "blobs"
        folder.mkdir(parents=True)

        def file(digest: str) -> Path:
            return folder / keys.run / "blobs" / digest[:2] / digest

        yield Place(
            lambda: ObjectBlobStore(f"file://{tmp_path}/a%20b/blobs", keys.run),
            lambda digest, payload: file(digest).write_bytes(payload),
            lambda digest: file(digest).read_bytes(),
            lambda digest: file(digest).unlink(),
        )
    else:
        s3 = request.getfixturevalue("s3")

        def path(digest: str) -> str:
            return f"/{BUCKET}/models/a/{keys.run}/blobs/{digest[:2]}/{digest}"

        yield Place(
            lambda: ObjectBlobStore(f"s3://{BUCKET}/models/a", keys.run, options=s3.options()),
            lambda digest, payload: s3.request("PUT", path(digest), payload),
            lambda digest: s3.request("GET", path(digest)),
            lambda digest: s3.request("DELETE", path(digest)),
        )


def test_what_is_put_is_there_for_others(place):
    digest = place.open().put(b"weights")
    assert digest == blob_digest(b"weights")
    assert len(digest) == 64
    assert place.open().get(digest, 7) == b"weights"
    assert place.read(digest) == b"weights"
    assert place.open().put(b"weights") == digest


@pytest.mark.parametrize("size", [0, 1, 17 * 2**20 + 3])
def test_sizes(place, size):
    """Nothing, a little, and more than goes up in one part."""
    payload = os.urandom(size)
    assert place.open().get(place.open().put(payload), size) == payload


def test_a_chunk_that_is_not_there_is_an_error_of_the_channel(place):
    with pytest.raises(DeltaError, match="chunk ffffffffffffffff is not in"):
        place.open().get("f" * 64, 1)


@pytest.mark.parametrize("spoilt", [b"Weights", b"weight", b"weights!", b""])
def test_an_altered_or_truncated_chunk_is_refused_and_put_again_heals_it(place, spoilt):
    store = place.open()
    digest = store.put(b"weights")
    place.write(digest, spoilt)
    with pytest.raises(DeltaError, match=f"chunk {digest[:16]} in .* was altered"):
        store.get(digest, 7)
    store.put(b"weights")
    assert store.get(digest, 7) == b"weights"


def test_a_chunk_of_another_size_than_the_manifest_says_is_refused(place):
    store = place.open()
    digest = store.put(b"weights")
    with pytest.raises(DeltaError, match="7 bytes of the 6 expected"):
        store.get(digest, 6)


def test_a_chunk_that_was_lost_can_be_put_again(place):
    store = place.open()
    digest = store.put(b"weights")
    place.remove(digest)
    with pytest.raises(DeltaError, match="is not in"):
        store.get(digest, 7)
    store.put(b"weights")
    assert store.get(digest, 7) == b"weights"


def test_chunks_are_listed_and_deleted(place):
    store = place.open()
    assert list(store.list()) == []
    sizes = {store.put(str(i).encode() * i): i for i in range(1, 13)}
    listed = {info.digest: info for info in store.list()}
    assert {digest: info.size_bytes for digest, info in listed.items()} == {
        d: len(str(i)) * i for d, i in sizes.items()
    }
    assert all(0 <= info.age_s < 120 for info in listed.values())
    gone = list(sizes)[:5]
    store.delete([gone[0], "f" * 64, *gone[1:], "e" * 64])
    store.delete(iter(gone))
    store.delete([])
    assert {info.digest for info in place.open().list()} == set(sizes) - set(gone)
    for digest in sizes:
        if digest not in gone:
            assert blob_digest(store.get(digest, listed[digest].size_bytes)) == digest


@pytest.mark.parametrize("place", ["redis", "directory", "s3"], indirect=True)  # in memory each run has one of its own
def test_runs_do_not_see_each_other(place, keys, tmp_path, s3, client):
    mine = place.open()
    digest = mine.put(b"mine")
    (tmp_path / "a b" / "blobs").mkdir(parents=True, exist_ok=True)
    others = (
        RedisBlobStore(client, Keys(keys.run + "x")),
        ObjectBlobStore(f"file://{tmp_path}/a%20b/blobs", keys.run + "x"),
        ObjectBlobStore(f"s3://{BUCKET}/models/a", keys.run + "x", options=s3.options()),
    )
    for other in others:
        other.delete([digest])
        assert list(other.list()) == []
    assert mine.get(digest, 4) == b"mine"
    assert [info.digest for info in mine.list()] == [digest]


def test_many_threads_share_one_store(place):
    store = place.open()
    common = [str(i % 5).encode() * 1000 for i in range(40)]
    failures: list[Exception] = []

    def work(own: int) -> None:
        try:
            for payload in common:
                digest = store.put(payload)
                assert store.get(digest, len(payload)) == payload
                mine = store.put(payload + bytes([own]))
                assert store.get(mine, len(payload) + 1) == payload + bytes([own])
        except Exception as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(list(store.list())) == 35


def test_what_a_killed_writer_left_is_no_chunk_and_goes(tmp_path, monkeypatch):
    store = ObjectBlobStore(f"file://{tmp_path}", "r")
    first = store.put(b"first")
    aside = tmp_path / "r" / "aside"
    left = [aside / "old.tmp", aside / "new.tmp", tmp_path / "r" / "blobs" / first[:2] / "half"]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (1, 1))
    for i in range(50):
        store.put(bytes([i]))
    assert len(list(store.list())) == 51
    assert [path.exists() for path in left] == [False, True, True]
    assert sorted(path.name for path in aside.iterdir()) == ["new.tmp"]


def test_a_directory_is_synced_before_a_chunk_has_its_name(tmp_path, monkeypatch):
    """After `put` returns the chunk survives a power cut: its bytes, its name, and the folders it lies in."""
    store = ObjectBlobStore(f"file://{tmp_path}", "r")
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def renamed(source, target) -> None:
        done.append(f"rename {Path(source).suffix} {Path(target).name[:4]}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    digest = store.put(b"weights")
    assert done[-3].endswith(".tmp")
    assert done[-2:] == [f"rename .tmp {digest[:4]}", f"fsync {digest[:2]}"]
    assert {f"fsync {tmp_path.name}", "fsync r", "fsync blobs"} <= set(done[:-3])


def test_the_store_is_the_one_that_the_configuration_names(tmp_path, s3):
    def section(*more: str):
        return load_config("", overrides=[f"channel.{m}" for m in more]).channel

    assert open_blob_store(section(), "r") is None
    here = open_blob_store(section(f"blobs=file://{tmp_path}"), "r")
    digest = here.put(b"x")
    assert (tmp_path / "r" / "blobs" / digest[:2] / digest).read_bytes() == b"x"
    options = "{" + ", ".join(f'{k} = "{value}"' for k, value in s3.options().items()) + "}"
    there = open_blob_store(section(f"blobs=s3://{BUCKET}/c", f"blob_options={options}"), "r")
    assert there.get(there.put(b"y"), 1) == b"y"


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("s3://b/p", {"nonsense": "1"}, "'nonsense' is not valid for store 'S3'"),
        ("s3://", {}, "cannot be used"),
        ("file:///tmp/x", {"region": "eu"}, "takes no options"),
        ("file://relative/x", {}, "'relative' would be a host"),
        ("az://account", {}, "names no container"),
        ("s3://k:s3cret@b/p", {}, "credentials do not belong into the URL"),
        ("ftp://b/p", {}, "cannot be used"),
    ],
)
def test_an_unusable_store_is_a_configuration_error(url, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ObjectBlobStore(url, "r", options=options)
    assert caught.value.exit_code == 78
    assert "s3cret" not in str(caught.value)


def test_reading_from_a_directory_that_does_not_exist_says_so_and_makes_none(tmp_path):
    store = ObjectBlobStore(f"file://{tmp_path}/there", "r")
    for call in (lambda: store.get("f" * 64, 1), lambda: list(store.list()), lambda: store.delete(["f" * 64])):
        with pytest.raises(StreamUnavailableError, match=r"/there does not exist on this machine; mount it, make it"):
            call()
    assert list(tmp_path.iterdir()) == []
    digest = ObjectBlobStore(f"file://{tmp_path}/there", "r").put(b"x")
    assert store.get(digest, 1) == b"x"


def test_only_the_last_component_of_a_directory_is_made_and_only_once(tmp_path):
    deep = ObjectBlobStore(f"file://{tmp_path}/mount/there", "r")
    with pytest.raises(
        StreamUnavailableError, match=r"does not exist on this machine, and neither does .*/mount; mount"
    ):
        deep.put(b"x")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mount").mkdir()
    deep.put(b"x")
    deep.put(b"y")
    (tmp_path / "mount" / "there").rename(tmp_path / "unmounted")
    with pytest.raises(StreamUnavailableError, match="does not exist"):
        deep.put(b"z")
    assert list((tmp_path / "mount").iterdir()) == []


def test_a_container_of_azure_is_that_of_its_url(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    store = ObjectBlobStore("az://account/container/pre/fix", "r")._objects._store
    assert store.config["account_name"] == "account"
    assert store.config["container_name"] == "container"
    assert store.prefix == "pre/fix"
