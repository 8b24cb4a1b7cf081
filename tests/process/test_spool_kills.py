"""kill -9 at random points of a producer's outbox, and of its region's server: every group that `put` returned for is there,
under numbers without a gap, and no stream holds one twice.

`ANABRANCH_KILLS` sets how many kills (30 by default), `ANABRANCH_KILL_SEED` which.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.producers.spool_load import read_spool, spool_folders
from anabranch.schemas.envelope import open_envelope
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.trajectory import decode_group
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect, open_client
from anabranch.transport.redis_stream import RedisStream
from tests.process.spool_actors import RUN
from tests.zygote import Zygote, is_alive, kill

pytestmark = pytest.mark.process

KILLS = int(os.environ.get("ANABRANCH_KILLS", "30"))
# Calls that a process makes of that sort in its first half second or so, as powers of ten
MOST = {"put": 3.3, "file": 1.8, "open": 1.6, "send": 3.0}


class Site:
    """Producers over one spool directory, and what they have said."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self.spools, self.log, self.output = folder / "spool", folder / "events", folder / "output"
        self.zygote, self.pids = zygote, list[int]()
        self.rng = random.Random(int(os.environ.get("ANABRANCH_KILL_SEED", "0")) or None)

    def producer(self, *, fused: bool = True, **kwargs: Any) -> int:
        where = self.rng.choice(["outside", *MOST])
        fuse = {"die": int(10 ** self.rng.uniform(0, MOST[where])), "where": where} if fused and where in MOST else {}
        pid = self.zygote.spawn(
            "tests.process.spool_actors:put_on",
            self.output,
            folder=str(self.spools),
            log=str(self.log),
            **fuse,
            **kwargs,
        )
        self.pids.append(pid)
        return pid

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] == event]

    def put(self) -> set[int]:
        return {e["index"] for e in self.events("put")}

    def kill_some(self, count: int, alive: int, **kwargs: Any) -> None:
        """Until `count` producers were killed and twice as many groups were put; `alive` of them run at a time."""
        running = [self.producer(**kwargs) for _ in range(alive)]
        killed, before = 0, len(self.put())
        while killed < count or len(self.put()) < before + 2 * count:
            time.sleep(self.rng.uniform(0.0, 0.15))
            victim = self.rng.choice(running)
            if self.rng.random() < 0.4 and is_alive(victim):
                kill(victim)
            for i, pid in enumerate(running):
                if not is_alive(pid):
                    killed += 1
                    running[i] = self.producer(**kwargs)
            self.assert_nothing_went_wrong()
        for pid in running:
            kill(pid)

    def wait_for_put(self, *pids: int) -> None:
        until(lambda: set(pids) <= {e["pid"] for e in self.events("put")}, "the producers to put", self.report)

    def returns(self) -> int:
        """How often a producer has noticed that the server is back."""
        return self.output.read_text().count("region stream is back")

    def wait_for_return(self, before: int) -> None:
        until(lambda: self.returns() > before, "the server to be noticed", self.report)

    def is_done(self, pid: int) -> bool:
        return [e["done"] for e in self.events("idle") if e["pid"] == pid][-1:] == [True]

    def report(self) -> str:
        return f"{self.events('idle')[-2:]} {self.output.read_text()[-3000:]}"

    def assert_nothing_went_wrong(self) -> None:
        said = self.output.read_text() if self.output.exists() else ""
        assert "Traceback" not in said, said
        assert "damaged" not in said, said
        assert "unreadable" not in said, said
        assert "older state" not in said, said


def until(condition: Callable[[], bool], what: str, report: Callable[[], str], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}: {report()}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote("tests.process.spool_actors:warm_up")
    yield made
    made.close()


@pytest.fixture
def site(tmp_path: Path, zygote: Zygote) -> Iterator[Site]:
    made = Site(tmp_path, zygote)
    yield made
    for pid in made.pids:
        kill(pid)


@pytest.mark.timeout(120 + 4 * KILLS)
@pytest.mark.parametrize("fsync", ["always", "interval"])
def test_every_group_that_was_put_is_in_a_spool_once(site: Site, fsync: str) -> None:
    """The region is away; two producers take turns with their two slots."""
    site.kill_some(KILLS // 2, alive=2, fsync=fsync, max_bytes=2**30)
    folders = spool_folders(site.spools)
    assert len(folders) <= 2, "each went on with what was there"
    found: Counter[int] = Counter()
    for folder in folders:
        rows = list(read_spool(folder))
        assert len({producer for producer, *_ in rows}) <= 1
        assert [seq for _, seq, _, _ in rows] == list(range(1, len(rows) + 1))
        for producer, _, index, payload in rows:
            group = decode_group(payload)
            assert (group.group_index, group.producer) == (index, producer)
            found[index] += 1
    put = site.put()
    assert put <= set(found), "nothing is lost"
    assert set(found.values()) == {1}
    assert len(found) - len(put) <= 2 + len(site.pids), "what was written and not yet reported"
    begun = [e["waiting"] for e in site.events("begins")]
    assert max(begun) > 0


class Learner:
    """Reads and settles, without ever trimming; knows what it has seen by (producer, seq)."""

    def __init__(self, url: str) -> None:
        self.stream = RedisStream(open_client(url, deadline_s=1, what="the region"), Keys(RUN))
        self.seen: dict[tuple[str, int], int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        held: list[str] = []
        while not self._stop.is_set():
            try:
                for delivery in self.stream.read(LEARNER_GROUP, "c", max_entries=64, block_ms=20):
                    envelope = open_envelope(delivery.fields, max_entry_bytes=2**20)
                    before = self.seen.setdefault((envelope.producer, envelope.seq), envelope.group_index)
                    assert before == envelope.group_index, "a number was used for two groups"
                    held.append(delivery.entry_id)
                self.stream.settle(LEARNER_GROUP, [(entry, "trained") for entry in held])
                held.clear()
            except StreamUnavailableError:
                time.sleep(0.02)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(20)
        self.stream.close()


@pytest.mark.timeout(120 + 6 * KILLS)
def test_nothing_is_lost_when_producers_and_a_server_that_forgets_are_killed(site: Site, tmp_path: Path) -> None:
    """The server comes back without what it acknowledged in its last second, settlings too."""
    with EmbeddedValkey(tmp_path / "region", fsync="everysec") as server:
        learner = Learner(server.url)
        # A full spool sends nothing, and would not notice that the server is away.
        options = {"url": server.url, "release_after_ms": 3000, "max_bytes": 2**26}
        for _ in range(3):
            site.kill_some(KILLS // 6, alive=2, **options)
            running = [site.producer(fused=False, **options) for _ in range(2)]
            site.wait_for_put(*running)
            append_only = _append_only_file(server)
            size = append_only.stat().st_size
            time.sleep(site.rng.uniform(0.3, 1.0))
            before = site.returns()
            server.kill()
            os.truncate(append_only, size)  # what a machine without power loses
            time.sleep(site.rng.uniform(0, 0.5))
            server.start()
            site.wait_for_return(before)
            for pid in running:
                kill(pid)
        assert "the stream has forgotten groups that it took" in site.output.read_text()
        last = site.producer(fused=False, groups=3, adopt_after_s=0.5, **options)  # adopts the other's spool
        until(lambda: len(spool_folders(site.spools)) == 1 and site.is_done(last), "the spools to drain", site.report)
        kill(last)
        learner.close()
        site.assert_nothing_went_wrong()
        client = connect(server.url, deadline_s=10, what="the region")
        stream = RedisStream(client, Keys(RUN))
        entries = [open_envelope(fields, max_entry_bytes=2**20) for _, fields in client.xrange(Keys(RUN).trajectories)]
        counts = stream.ledger(LEARNER_GROUP)
        stream.close()
    put = site.put()
    assert put <= {e.group_index for e in entries}, "nothing is lost: what the server forgot was given again"
    assert put <= set(learner.seen.values())
    by_producer: dict[str, list[int]] = {}
    for entry in entries:
        by_producer.setdefault(entry.producer, []).append(entry.seq)
    for producer, numbers in by_producer.items():
        assert numbers == list(range(1, len(numbers) + 1)), f"{producer}: each once, in order, without a gap"
    assert len({e.group_index for e in entries}) == len(entries)
    assert counts.balanced
    assert (counts.produced, counts.pending, counts.fates) == (len(entries), 0, {"trained": len(entries)})


def _append_only_file(server: EmbeddedValkey) -> Path:
    """The file that it writes to at present."""
    return max((server.directory / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)
