"""kill -9 of the learner between any two acts of its feed, and of the regions' servers, which forget their last second: every
group has one line in the fate log, the ledger says the same, and nothing is trained twice.

`ANABRANCH_KILLS` sets how many kills (16 by default), `ANABRANCH_KILL_SEED` which.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.consumers.fate_files import FATES_DIRECTORY, read_fates
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.fates import CONSUMED
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.trajectory import encode_group
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from tests.groups import group
from tests.process.feed_actors import BATCH, RUN
from tests.zygote import Zygote, is_alive, kill

pytestmark = pytest.mark.process
KILLS = int(os.environ.get("ANABRANCH_KILLS", "16"))
MOST = {"log": 2.5, "feed": 2.8, "settle": 2.8, "checkpoint": 2.6, "read": 3.5}  # calls, as powers of ten
REGIONS = ("east", "west")


class Site:
    """Two regions with a producer each, which keeps all it sent and gives again what its server forgot."""

    def __init__(self, root: Path, zygote: Zygote) -> None:
        self.root, self.zygote = root, zygote
        self.log, self.output = root / "events", root / "output"
        self.servers = {name: EmbeddedValkey(root / name, fsync="everysec") for name in REGIONS}
        self.streams: dict[str, RedisStream] = {}
        self.sent: dict[str, list[Envelope]] = {name: [] for name in REGIONS}
        self.next_index = 0
        self.rng = random.Random(os.environ.get("ANABRANCH_KILL_SEED"))
        self.pid = 0

    def __enter__(self) -> Site:
        for name, server in self.servers.items():
            server.start()
            self.streams[name] = RedisStream(connect(server.url, deadline_s=20, what=name), Keys(RUN))
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            kill(self.pid)
        for stream in self.streams.values():
            stream.close()
        for server in self.servers.values():
            server.stop()

    def learner(self, **kwargs: Any) -> None:
        urls = {name: server.url for name, server in self.servers.items()}
        self.pid = self.zygote.spawn(
            "tests.process.feed_actors:learn",
            self.output,
            urls=urls,
            folder=str(self.root),
            log=str(self.log),
            **kwargs,
        )

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [said for line in lines if (said := json.loads(line))["event"] == event]

    def produce(self) -> None:
        """A group or two, now and then one of an index that was sent before; sampled by weights that may be too old."""
        steps = self.events("opened") + self.events("stepped")
        newest = max(steps, key=lambda said: (said["epoch"], said["version"]), default={"epoch": 1, "version": 0})
        for _ in range(self.rng.randint(1, 2)):
            again = self.next_index and self.rng.random() < 0.15
            index = self.rng.randrange(self.next_index) if again else self.next_index
            self.next_index = max(self.next_index, index + 1)
            region = self.rng.choice(REGIONS)
            version = max(0, newest["version"] - self.rng.choice([0, 0, 0, 1, 2, 4]))
            made = group(index, version=version, epoch=newest["epoch"], run=RUN, region=region)
            self.sent[region].append(Envelope("p", len(self.sent[region]) + 1, index, encode_group(made)))
            self.give(region)

    def give(self, region: str) -> None:
        """What the stream has not, as a sender does; `floor` is the first, since all is kept."""
        first = self.streams[region].progress("p").next_seq or 1
        self.streams[region].append(self.sent[region][first - 1 :], floor=1)

    def restart_a_server(self) -> None:
        region = self.rng.choice(REGIONS)
        self.servers[region].kill()
        self.servers[region].start()
        self.give(region)

    def wait(self, ready: Callable[[], object], what: str, *, produce: bool = True) -> None:
        end = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < end, f"{what}\n{self.output.read_text(errors='replace')[-3000:]}"
            if produce:
                self.produce()
            time.sleep(0.01)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote("tests.process.feed_actors:warm_up")
    yield made
    made.close()


@pytest.mark.timeout(120 + 8 * KILLS)
def test_one_line_for_each_group_and_nothing_twice(tmp_path: Path, zygote: Zygote) -> None:
    with Site(tmp_path, zygote) as site:
        for number in range(KILLS):
            where = site.rng.choice([*MOST, "outside"])
            stepped = len(site.events("stepped"))
            if where == "outside":
                site.learner()
                site.wait(lambda: len(site.events("stepped")) > stepped + 3, "the learner takes no step")  # noqa: B023
                kill(site.pid)
            else:
                site.learner(die=int(10 ** site.rng.uniform(0, MOST[where])), where=where)
                site.wait(lambda: not is_alive(site.pid), f"kill {number}: the learner does not die in {where}")
            if site.rng.random() < 0.3:
                site.restart_a_server()
        site.learner(end=True)
        site.wait(lambda: len(site.events("stepped")) > stepped + 3, "the last learner takes no step")
        site.restart_a_server()
        site.wait(lambda: not is_alive(site.pid), "the last learner does not end", produce=False)
        assert site.events("ended"), site.output.read_text(errors="replace")[-3000:]
        check(site)


def check(site: Site) -> None:
    records = list(read_fates(site.root / FATES_DIRECTORY))
    assert Counter(r.identity for r in records) == Counter(
        (n, e.producer, e.seq) for n in REGIONS for e in site.sent[n]
    )
    consumed = Counter(r.group_index for r in records if r.fate in CONSUMED)
    assert max(consumed.values()) == 1, "trained twice"
    assert sum(consumed.values()) == BATCH * site.events("ended")[-1]["version"], "every step's groups are in the log"
    for region, stream in site.streams.items():
        counts = stream.ledger(LEARNER_GROUP)
        assert (counts.balanced, counts.pending, counts.foreign) == (True, 0, 0)
        assert counts.produced == len(site.sent[region])
        assert counts.fates == Counter(r.fate for r in records if r.region == region)
    kinds = Counter(r.fate for r in records)
    assert kinds["dropped:age"] > 0, kinds
    assert kinds["dropped:duplicate"] > 0, kinds
    text = site.output.read_text(errors="replace") if site.output.exists() else ""
    assert "Traceback" not in text, text[-3000:]
