"""An update crosses the link to a region once, for any number of producers, through a replica or an object store."""

from __future__ import annotations

import http.client
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.deploy.link_redis import PORT, start_redis
from anabranch.deploy.slow_link import ADDRESS, SIDES, Side, SlowLink
from tests.e2e.region_sites import S3_PORT, Sites, two_sites

pytestmark = [pytest.mark.process, pytest.mark.timeout(110)]
SITE = Path(__file__).with_name("region_site.py")
ROOT = Path(__file__).resolve().parent.parent.parent
UPDATES = 6


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with two_sites(tmp_path_factory.mktemp("two sites")) as made:
        assert made.replication()["role"] == "slave"
        yield made


class Site:
    """region_site.py in a role of its own."""

    def __init__(self, link: SlowLink, side: Side, role: str, config: Path, environ: dict[str, str]) -> None:
        argv = [sys.executable, "-P", str(SITE), role, str(config)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
        self.process = link.run(side, argv, stdin=-1, stdout=-1, text=True, env=environ)
        assert self.answer() == {"ready": True}

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self, deadline_s: float = 45.0) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        assert ready, "no answer from a site"
        line = self.process.stdout.readline()
        assert line, f"a site ended with {self.process.wait(10)}"
        return json.loads(line)


def crossed(link: SlowLink) -> int:
    return sum(link.received_bytes(side) for side in SIDES)


def bytes_of_updates(sites: Sites, config: Path, environ: dict[str, str]) -> tuple[dict[int, int], int]:
    """Bytes that crossed the link while 1, then 8 producers of the region took UPDATES versions each; their payload."""
    learner = Site(sites.link, "a", "publisher", config, environ)
    region = Site(sites.link, "b", "producers", config, environ)
    crossing: dict[int, int] = {}
    for count in (1, 8):
        region.ask(f"grow {count}")
        head = learner.ask("step 1")
        region.ask(f"reach {head['epoch']} {head['version']}")  # connected, anchor taken, leases told
        before, payload = crossed(sites.link), 0
        for _ in range(UPDATES):
            head = learner.ask("step 1")
            payload += head["bytes"]
            reached = region.ask(f"reach {head['epoch']} {head['version']}")
            assert len(reached["digests"]) == 1, reached
        crossing[count] = crossed(sites.link) - before
    return crossing, payload


def config_file(sites: Sites, path: Path, run: str, channel: str) -> Path:
    region = f"redis://{ADDRESS['b']}:{PORT['region']}/0"
    path.write_text(
        f'[run]\nname = "{run}"\n[hub]\nurl = "{sites.hub.url}"\n'
        f'[regions.east]\nurl = "{region}"\nweights_url = "{sites.replica.url}"\n'
        f"[producer]\npoll_ms = 20\n[channel]\n{channel}\n"
    )
    return path


def test_an_update_crosses_the_link_once_for_any_number_of_producers(sites: Sites, tmp_path: Path) -> None:
    crossing, payload = bytes_of_updates(sites, config_file(sites, tmp_path / "c.toml", "bytes", ""), {})
    assert abs(crossing[8] / crossing[1] - 1) <= 0.05, crossing
    assert payload < crossing[1] < 1.15 * payload


def test_so_it_does_from_an_object_store_through_the_region_s_cache(sites: Sites, tmp_path: Path) -> None:
    endpoint = f"{ADDRESS['a']}:{S3_PORT}"
    make_bucket(sites.link, endpoint)
    start_redis(sites.link, "b", "region", tmp_path / "region")
    channel = (
        'blobs = "s3://weights/runs"\nregion_cache_bytes = 100_000_000\n'
        f'[channel.blob_options]\nendpoint = "http://{endpoint}"\nregion = "us-east-1"\nallow_http = "true"'
    )
    environ = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    crossing, payload = bytes_of_updates(sites, config_file(sites, tmp_path / "c.toml", "store", channel), environ)
    assert abs(crossing[8] / crossing[1] - 1) <= 0.05, crossing
    assert payload < crossing[1] < 1.15 * payload


def make_bucket(link: SlowLink, endpoint: str) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            with link.inside("a"):
                connection = http.client.HTTPConnection(endpoint, timeout=5)
                connection.request("PUT", "/weights")
                assert connection.getresponse().status == 200
                connection.close()
                return
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the S3 server does not start"
            time.sleep(0.1)
