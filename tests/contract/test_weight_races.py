"""The weight channel when others act at the same moment, and when answers are lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from blake3 import blake3

from anabranch.schemas.errors import BackpressureError, ManifestError, StreamUnavailableError
from anabranch.schemas.manifest import Chunk, Manifest
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.weight_path import cheapest_path
from tests.contract.flaky_link import FlakyLink
from tests.contract.weight_worlds import LAYOUT, chain, describe, digest_of, entry, publish, shown, v


@pytest.fixture
def link(valkey) -> Iterator[FlakyLink]:
    made = FlakyLink(valkey.port)
    yield made
    made.close()


@pytest.fixture
def far(valkey, link, keys) -> Iterator[RedisWeightChannel]:
    """A channel over the link."""
    url = valkey.url.replace(str(valkey.port), str(link.port))
    made = RedisWeightChannel(connect(url, deadline_s=10, what="the far hub"), keys)
    yield made
    made.close()


@pytest.fixture
def near(client, keys) -> RedisWeightChannel:
    return RedisWeightChannel(client, keys)


def in_threads(*calls) -> list[Exception | None]:
    """Run all at once; what each raised."""
    raised: list[Exception | None] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def run(i: int) -> None:
        gate.wait(10)
        try:
            calls[i]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            raised[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def test_of_two_that_commit_one_version_one_wins(world):
    one, two = world.open(), world.open()
    chain(one, world.run, 0)
    for version in range(1, 16):
        more = {"base_digest": one.index()[-1].digest}
        ours = describe(one, world.run, "delta", version, payloads=(b"ours",), digest="a" * 32, **more)
        theirs = describe(two, world.run, "delta", version, payloads=(b"theirs",), digest="b" * 32, **more)
        raised = in_threads(lambda m=ours: one.commit(m), lambda m=theirs: two.commit(m))
        assert sorted(type(e) for e in raised if e) == [ManifestError]
        won = ours if raised[0] is None else theirs
        assert one.manifests([(v(version), "delta")]) == [won]
        assert one.head() == v(version)


def test_whoever_sees_a_head_can_read_the_way_to_it(world):
    """Followers race the publisher and its retention; one has a lease, one comes from nothing every time."""
    publisher, follower, newcomer = world.open(grace_ms=60_000), world.open(), world.open()
    chain(publisher, world.run, 0)
    follower.lease("f", v(0), ttl_ms=60_000)
    done = threading.Event()
    seen: list[int] = []

    def follow() -> None:
        at = v(0)
        while not done.is_set():
            head = follower.head()
            for e in follower.index(above=at):
                (manifest,) = follower.manifests([(e.policy, e.label)])
                assert manifest is not None, f"{e} is gone under a lease of {at}"
                follower.blobs.get(manifest.chunks[0].digest, manifest.chunks[0].size_bytes)
            at = head
            follower.lease("f", at, ttl_ms=60_000)
            seen.append(at.version)

    def join() -> None:
        while not done.is_set():
            index = newcomer.index()
            newest = max(e.policy for e in index)
            assert cheapest_path(index, None, newest), f"no way to {newest} in {shown(index)}"

    def lead() -> None:
        try:
            for version in range(1, 80):
                publish(publisher, world.run, "delta", version)
                if version % 8 == 0:
                    publish(publisher, world.run, "anchor", version)
                publisher.drop(publisher.index())
        finally:
            done.set()

    assert in_threads(follow, join, lead) == [None, None, None]
    assert seen


def test_a_commit_whose_answer_is_lost_counts_its_chunks_once(client, far, near, link, keys):
    chain(far, keys.run, 1)
    manifest = describe(far, keys.run, "delta", 2, payloads=(b"once",))
    link.lose_replies(b"EVALSHA")
    far.commit(manifest)
    assert link.lost == 1
    assert near.head() == v(2)
    publish(near, keys.run, "anchor", 3)
    near.drop(near.index())
    assert client.exists(keys.blob(manifest.chunks[0].digest)) == 0


def test_a_drop_whose_answer_is_lost_still_says_what_went(far, near, link, keys):
    chain(far, keys.run, 3)
    publish(far, keys.run, "anchor", 4)
    far.drop([])
    link.lose_replies(b"EVALSHA")
    assert shown(far.drop(far.index())) == ["e1.v0 anchor", "e1.v1 delta", "e1.v2 delta", "e1.v3 delta"]
    assert link.lost == 1
    assert shown(near.index()) == ["e1.v4 anchor"]


def test_a_link_that_keeps_losing_answers_ends_in_an_error(far, link, keys):
    chain(far, keys.run, 1)
    link.lose_replies(b"EVALSHA", times=10**6)
    with pytest.raises(StreamUnavailableError, match=r":\*\*\*@127\.0\.0\.1"):
        far.lease("f", v(0), ttl_ms=1000)


def during_the_next_index(channel, act) -> None:
    """`act()` once, right after `channel` has read the index: between a decision and what it leads to."""
    read = channel.index

    def index(**more):
        found = read(**more)
        channel.index = read
        act()
        return found

    channel.index = index


def test_a_pin_taken_during_a_drop_counts(client, near, keys):
    other = RedisWeightChannel(client, keys)
    chain(near, keys.run, 4)
    publish(near, keys.run, "anchor", 5)
    during_the_next_index(near, lambda: other.pin(v(2), "now"))
    assert shown(near.drop(other.index())) == ["e1.v3 delta", "e1.v4 delta"]
    assert cheapest_path(near.index(), None, v(2))


def test_a_drop_during_a_pin_refuses_it(client, near, keys):
    other = RedisWeightChannel(client, keys)
    chain(near, keys.run, 4)
    publish(near, keys.run, "anchor", 5)
    during_the_next_index(near, lambda: other.drop(other.index()))
    with pytest.raises(ManifestError, match="dropped just now"):
        near.pin(v(2), "too late")
    assert near.pins() == {}


def test_a_head_that_moves_to_a_fork_during_a_drop_keeps_its_way(client, near, keys):
    other = RedisWeightChannel(client, keys)
    chain(near, keys.run, 4)
    publish(near, keys.run, "anchor", 5)
    during_the_next_index(near, lambda: publish(other, keys.run, "fork", 3, epoch=2, base=(1, 3)))
    near.drop(other.index())
    assert cheapest_path(near.index(), None, v(3, 2))


def test_two_that_drop_different_ways_leave_one(client, near, keys):
    """One decides before an anchor came, one after: each would drop what the other keeps."""
    other = RedisWeightChannel(client, keys)
    chain(near, keys.run, 4)
    publish(near, keys.run, "skip", 4, base=(1, 0))
    everything = near.index()

    def meanwhile() -> None:
        publish(other, keys.run, "anchor", 3)
        other.drop(other.index())

    during_the_next_index(near, meanwhile)
    near.drop([e for e in everything if e.policy.version < 4])
    assert cheapest_path(near.index(), None, v(4))


def test_chunks_nobody_committed_expire_and_committed_ones_do_not(client, near, keys):
    orphan = near.blobs.put(b"orphan")
    manifest = publish(near, keys.run, "anchor", 0, payloads=(b"kept",))
    assert near.blobs.put(b"kept") == manifest.chunks[0].digest
    assert client.pttl(keys.blob(orphan)) > 0
    assert client.pttl(keys.blob(manifest.chunks[0].digest)) == -1


def test_a_hundred_thousand_chunks_are_one_manifest(client, near, keys):
    """A model of a terabyte; a script that unpacks its arguments dies at 8,000."""
    chain(near, keys.run, 0)
    digests = [blake3(i.to_bytes(4, "little")).hexdigest() for i in range(100_000)]
    for first in range(0, len(digests), 10_000):
        pipe = client.pipeline(transaction=False)
        for digest in digests[first : first + 10_000]:
            pipe.set(keys.blob(digest), b"x", px=600_000)
        pipe.execute()
    few = describe(near, keys.run, "delta", 1)
    chunks = tuple(Chunk(digest=digest, size_bytes=1) for digest in digests)
    many = Manifest.model_validate({**dict(few), "chunks": chunks})
    near.commit(many)
    assert client.pttl(keys.blob(digests[-1])) == -1
    assert near.manifests([(v(1), "delta")]) == [many]
    publish(near, keys.run, "anchor", 2)
    assert near.drop([entry(many)]) == [entry(many)]
    assert client.exists(*map(keys.blob, digests)) == 0
    assert client.hlen(keys.blob_references) == 2


def test_a_full_hub_refuses_a_commit_whole_and_still_makes_room(tmp_path, keys):
    with EmbeddedValkey(tmp_path / "v", maxmemory_bytes=64 * 2**20, fsync="everysec") as server:
        client = connect(server.url, deadline_s=10, what="the hub")
        channel = RedisWeightChannel(client, keys)
        chain(channel, keys.run, 3)
        publish(channel, keys.run, "anchor", 4)
        manifest = describe(channel, keys.run, "delta", 5)
        client.config_set("maxmemory", 1)
        with pytest.raises(BackpressureError, match="takes no more data"):
            channel.commit(manifest)
        with pytest.raises(BackpressureError, match="takes no more data"):
            channel.blobs.put(b"more")
        assert channel.head() == v(4)
        assert client.hlen(keys.blob_references) == 5
        assert len(channel.drop(channel.index())) == 4
        assert client.hlen(keys.blob_references) == 1
        client.config_set("maxmemory", 64 * 2**20)
        channel.commit(manifest)
        assert channel.head() == v(5)
        channel.close()


def test_a_replica_can_be_read_by_all_that_only_reads(client, near, keys):
    """What a follower calls makes no script and no write, which a replica refuses."""
    chain(near, keys.run, 2)
    publish(near, keys.run, "fork", 2, epoch=2, base=(1, 2))
    near.pin(v(1), "x")
    near.lease("f", v(1), ttl_ms=60_000)
    commands: list[str] = []
    run, pipeline = client.execute_command, client.pipeline

    def watched(*args, **more):
        commands.append(args[0])
        return run(*args, **more)

    def watched_pipeline(**more):
        pipe = pipeline(**more)
        queue = pipe.pipeline_execute_command
        pipe.pipeline_execute_command = lambda *args, **options: (commands.append(args[0]), queue(*args, **options))[1]
        return pipe

    client.execute_command, client.pipeline = watched, watched_pipeline
    manifest = near.manifests([(near.head(), "fork"), (v(2), "delta")])[1]
    near.index(above=v(1))
    near.layout(LAYOUT.hash)
    near.blobs.get(manifest.chunks[0].digest, manifest.chunks[0].size_bytes)
    near.leases(), near.pins(), near.shares(v(1), "delta"), list(near.blobs.list())
    del client.execute_command, client.pipeline
    assert len(commands) > 8
    known = client.command()
    writes = [name for name in commands if "write" in known[name.split()[0].lower()]["flags"]]
    assert writes + [name for name in commands if name.startswith(("EVAL", "FCALL"))] == []
    assert manifest.result_digest == digest_of(2)
