"""A region that is away at the start holds nobody up; none at all is an error that names them, without passwords."""

from __future__ import annotations

import time

import pytest

from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.transport import wiring
from anabranch.transport.embedded_valkey import EmbeddedValkey

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
