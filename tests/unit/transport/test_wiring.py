"""From a configuration to clients: a region that is away at the start holds nobody up; none at all is an error that names
them, without passwords; weights come from the hub, a replica, or a blob store."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import ConfigError, StreamUnavailableError
from anabranch.schemas.keys import Keys
from anabranch.transport import wiring
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.retry import wait_until
from tests.contract.weight_worlds import chain, v

NOBODY = "redis://:s3cret@127.0.0.1:1/0"


def config(**urls: str) -> RunConfig:
    overrides = [f"regions.{name}.url={url}" for name, url in urls.items()]
    return load_config("", overrides=[*overrides, "channel.connect_deadline_s=2"])


def test_a_learner_starts_without_a_region_that_is_away(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "FURTHER_REGION_S", 0.5)
    started = time.monotonic()
    streams = wiring.connect_regions(config(away=NOBODY, here=valkey.url))
    assert time.monotonic() - started < 10
    assert sorted(streams) == ["away", "here"]
    assert streams["here"].ledger("learner").balanced
    with pytest.raises(StreamUnavailableError, match="region away"):
        streams["away"].read("learner", "c", max_entries=1, block_ms=1)
    for stream in streams.values():
        stream.close()


def test_no_region_at_all_is_an_error_that_names_them() -> None:
    with pytest.raises(StreamUnavailableError) as caught:
        wiring.connect_regions(config(east=NOBODY, west=NOBODY))
    assert "region east" in str(caught.value)
    assert "region west" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def wrong_password(server: EmbeddedValkey) -> str:
    return f"redis://:s3cret@127.0.0.1:{server.port}/0"


def test_a_learner_starts_without_a_region_that_refuses_it(valkey: EmbeddedValkey) -> None:
    with capture_logs() as logs:
        streams = wiring.connect_regions(config(here=valkey.url, refusing=wrong_password(valkey)))
    assert sorted(streams) == ["here", "refusing"]
    assert streams["here"].ledger("learner").balanced
    with pytest.raises(ConfigError, match=r"region refusing .* refused the credentials"):
        streams["refusing"].read("learner", "c", max_entries=1, block_ms=1)
    (alarm,) = logs
    assert (alarm["log_level"], alarm["region"]) == ("error", "refusing")
    for stream in streams.values():
        stream.close()


def test_credentials_that_every_region_refuses_are_a_wrong_configuration(valkey: EmbeddedValkey) -> None:
    with pytest.raises(ConfigError) as caught:
        wiring.connect_regions(config(east=wrong_password(valkey), west=wrong_password(valkey)))
    assert "region east" in str(caught.value)
    assert "region west" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_region_that_refuses_and_one_that_is_away_may_do_later(valkey: EmbeddedValkey) -> None:
    with pytest.raises(StreamUnavailableError, match=r"region away.*region refusing .* refused the credentials"):
        wiring.connect_regions(config(away=NOBODY, refusing=wrong_password(valkey)))


def test_an_unusable_url_of_one_region_is_a_wrong_configuration(valkey: EmbeddedValkey) -> None:
    with pytest.raises(ConfigError, match=r"region east: .* not a usable Redis URL"):
        wiring.connect_regions(config(east="redis://127.0.0.1:port/0", here=valkey.url))


# Weights

SHORT = load_config("", overrides=["channel.connect_deadline_s=0.3"]).channel


def weights_config(run: str, hub: str, region: str, **channel: object) -> RunConfig:
    overrides = [f"run.name={run}", f"hub.url={hub}", f"regions.local.url={region}", "channel.connect_deadline_s=5"]
    return load_config("", overrides=[*overrides, *(f"{key}={value}" for key, value in channel.items())])


def test_producers_read_weights_from_the_hub_or_from_their_replica(
    valkey: EmbeddedValkey, client: redis.Redis, tmp_path: Path, run_name: str
) -> None:
    client.config_set("repl-diskless-sync-delay", 0)
    with EmbeddedValkey(tmp_path / "replica", fsync="everysec") as replica:
        near = connect(replica.url, deadline_s=10, what="the replica")
        near.config_set("masterauth", valkey.password)
        near.replicaof("127.0.0.1", valkey.port)
        plain = weights_config(run_name, valkey.url, valkey.url)
        hub = wiring.connect_hub(plain).channel
        manifests = chain(hub, run_name, 3)
        hub.lease("f", v(1), ttl_ms=60_000)
        hub.pin(v(2), "good")

        channel = wiring.connect_weights(plain, "local")
        assert channel.head() == v(3)
        channel.close()
        channel = wiring.connect_weights(
            weights_config(run_name, valkey.url, valkey.url, **{"regions.local.weights_url": replica.url}), "local"
        )
        wait_until(lambda: channel.pins(), deadline_s=20, what="the replica to catch up")
        assert channel.head() == v(3)
        assert channel.manifests([(v(3), "delta")]) == manifests[3:]
        assert channel.index() == hub.index()
        assert channel.index(above=v(2)) == hub.index(above=v(2))
        assert channel.layout(manifests[0].layout_hash) == hub.layout(manifests[0].layout_hash)
        chunk = manifests[3].chunks[0]
        assert channel.blobs.get(chunk.digest, chunk.size_bytes) == hub.blobs.get(chunk.digest, chunk.size_bytes)
        assert [lease.policy for lease in channel.leases()] == [v(1)]
        assert {info.digest for info in channel.blobs.list()} == {m.chunks[0].digest for m in manifests}
        with pytest.raises(StreamUnavailableError, match="lost the weights replica of region local at redis://"):
            channel.lease("f", v(1), ttl_ms=1000)
        channel.close()
        hub.close()
        near.close()


def test_a_replica_or_hub_that_is_away_is_named_without_its_password(valkey: EmbeddedValkey) -> None:
    away = weights_config("r", valkey.url, valkey.url, **{"regions.local.weights_url": NOBODY})
    for config, what in (
        (away, "the weights replica of region local"),
        (weights_config("r", NOBODY, NOBODY), "the hub's Redis"),
    ):
        with pytest.raises(StreamUnavailableError, match=rf"no answer from {what} at redis://:\*\*\*@") as caught:
            wiring.connect_weights(config.model_copy(update={"channel": SHORT}), "local")
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("cache", [0, 100_000])
def test_chunks_of_a_directory_come_through_the_regions_cache(
    valkey: EmbeddedValkey, client: redis.Redis, keys: Keys, tmp_path: Path, cache: int
) -> None:
    more = {"channel.blobs": f"file://{tmp_path}", "channel.region_cache_bytes": cache}
    config = weights_config(keys.run, valkey.url, valkey.url, **more)
    hub, channel = wiring.connect_hub(config).channel, wiring.connect_weights(config, "local")
    manifest = chain(hub, keys.run, 1)[-1]
    digest, size = manifest.chunks[0].digest, manifest.chunks[0].size_bytes
    assert channel.blobs.get(digest, size) == (tmp_path / keys.run / "blobs" / digest[:2] / digest).read_bytes()
    assert client.exists(keys.blob(digest)) == 0
    assert client.exists(keys.cached_blob(digest)) == (1 if cache else 0)
    channel.close()
    hub.close()


def test_a_region_whose_cache_is_away_reads_from_the_store(valkey: EmbeddedValkey, keys: Keys, tmp_path: Path) -> None:
    more = {"channel.blobs": f"file://{tmp_path}", "channel.region_cache_bytes": 100_000}
    hub = wiring.connect_hub(weights_config(keys.run, valkey.url, valkey.url, **more)).channel
    chunk = chain(hub, keys.run, 1)[-1].chunks[0]
    channel = wiring.connect_weights(weights_config(keys.run, valkey.url, NOBODY, **more), "local")
    started = time.monotonic()
    assert len(channel.blobs.get(chunk.digest, chunk.size_bytes)) == chunk.size_bytes
    assert time.monotonic() - started < 10
    channel.close()
    hub.close()


def test_a_blob_store_that_cannot_be_used_stops_at_the_start(valkey: EmbeddedValkey) -> None:
    options = {"channel.blobs": "s3://bucket/p", "channel.blob_options": '{nonsense = "1"}'}
    config = weights_config("r", valkey.url, valkey.url, **options)
    for call in (lambda: wiring.connect_hub(config), lambda: wiring.connect_weights(config, "local")):
        with pytest.raises(ConfigError, match="'nonsense' is not valid"):
            call()


# Dead letters


def test_a_regions_stream_keeps_as_many_dead_letters_as_configured(valkey: EmbeddedValkey, run_name: str) -> None:
    overrides = [f"run.name={run_name}", f"regions.here.url={valkey.url}", "stream.max_dead_letters=2"]
    made = load_config("", overrides=overrides)
    streams = {"one": wiring.connect_region(made, "here"), "all": wiring.connect_regions(made)["here"]}
    letters = wiring.connect_dead_letters(made, "here")
    for number, stream in enumerate(streams.values()):
        first = 3 * number
        stream.append([Envelope("p", seq, seq, b"x") for seq in range(first, first + 3)], floor=0)
        for delivery in stream.read("learner", "c", max_entries=9, block_ms=0):
            stream.dead_letter("learner", delivery, "unreadable")
        assert (letters.count(), letters.made_room()) == (2, first + 1)
        stream.close()
    letters.close()


def test_dead_letters_of_a_region_that_is_away_are_an_error_that_names_it() -> None:
    with pytest.raises(StreamUnavailableError, match="the Redis of region away"):
        wiring.connect_dead_letters(config(away=NOBODY), "away")
