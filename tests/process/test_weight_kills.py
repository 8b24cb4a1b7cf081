"""kill -9 at random points of publish, fetch, decode and apply: whoever survives or starts again ends with the head's bits.

`ANABRANCH_KILLS` sets how many kills (24 by default), `ANABRANCH_KILL_SEED` which. Most come at a call that the process
makes (the n-th one in code that fetches, decodes, applies, joins, publishes, or any), the others from outside at any time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.producers.mirror_memory import MirrorState
from anabranch.producers.node_mirror import open_node_mirror
from anabranch.schemas.keys import Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.process.weight_actors import LAYOUT, RUN, anchor_chunks
from tests.zygote import Zygote, is_alive, kill

pytestmark = pytest.mark.process

KILLS = int(os.environ.get("ANABRANCH_KILLS", "24"))
FOLLOWERS = 3
# Calls that a process makes of that sort in its first second or so, as powers of ten
MOST = {"anywhere": 4.5, "decode": 3.5, "fetch": 2.5, "advance": 3.0, "rebuild": 2.0, "join": 1.5, "publish": 3.5}
ACTORS = "tests.process.weight_actors"


class Node:
    """Actors over one hub and one node folder, and what they have said."""

    def __init__(self, server: EmbeddedValkey, folder: Path, zygote: Zygote) -> None:
        self.url, self.folder, self.zygote = server.url, folder, zygote
        self.node_dir, self.log, self.output = folder / "node", folder / "events", folder / "output"
        self.channel = RedisWeightChannel(connect(server.url, deadline_s=20, what="the hub"), Keys(RUN))
        self.pids: list[int] = []

    def follower(self, **fuse: Any) -> int:
        return self._spawn("follow", node_dir=str(self.node_dir), **fuse)

    def publisher(self, every_s: float = 0.0, **fuse: Any) -> int:
        return self._spawn("publish", folder=str(self.folder), every_s=every_s, **fuse)

    def _spawn(self, what: str, **kwargs: Any) -> int:
        pid = self.zygote.spawn(f"{ACTORS}:{what}", self.output, url=self.url, log=str(self.log), **kwargs)
        self.pids.append(pid)
        return pid

    def events(self, event: str, *pids: int) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        said = [json.loads(line) for line in lines]
        return [s for s in said if s["event"] == event and (not pids or s["pid"] in pids)]

    def wait(self, what: str, ready: Any, *pids: int, deadline_s: float = 60) -> None:
        """Until `ready()`, while `pids` live."""
        end = time.monotonic() + deadline_s
        while not ready():
            assert all(map(is_alive, pids)), f"an actor ended while waiting for {what}:\n{self.output_text()}"
            assert time.monotonic() < end, f"{what} did not come:\n{self.output_text()}"
            time.sleep(0.01)

    def output_text(self) -> str:
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""

    def wait_until_served(self, policy: str, *pids: int, deadline_s: float = 60) -> None:
        def serve_it() -> bool:
            served = {s["pid"] for s in self.events("served") if s["policy"] == policy}
            return served >= set(pids)

        self.wait(f"{policy} to be served by {pids}", serve_it, *pids, deadline_s=deadline_s)

    def assert_nothing_wrong_was_said(self) -> None:
        """Every version that ever was in the mirror, or served, is one that was published under that name."""
        published = {str(e.policy): e.digest for e in self.channel.index()}
        for said in self.events("valid") + self.events("served"):
            assert published[said["policy"]] == said["digest"], said
        for said in self.events("served"):
            assert said["recomputed"] == said["digest"], said
            assert said["same"], f"the places that were told do not cover what changed: {said}"
        assert {s["alone"] for s in self.events("started")} == {""}

    def close(self) -> None:
        for pid in self.pids:
            if is_alive(pid):
                kill(pid)
        self.channel.close()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote(f"{ACTORS}:warm_up")
    yield made
    made.close()


@pytest.fixture
def node(tmp_path: Path, zygote: Zygote) -> Iterator[Node]:
    with EmbeddedValkey(tmp_path / "hub", fsync="everysec") as server:
        made = Node(server, tmp_path, zygote)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("producers", [2, 8])
def test_producers_of_a_node_fetch_once_and_serve_the_same_bits(node: Node, producers: int) -> None:
    publisher = node.publisher(every_s=0.05)
    node.wait("a first version", lambda: node.channel.head() is not None, publisher)
    followers = [node.follower() for _ in range(producers)]
    node.wait("all to start", lambda: len(node.events("served")) >= producers, *followers)
    kill(publisher)
    head = node.channel.head()
    assert head is not None
    node.wait_until_served(str(head), *followers)
    node.assert_nothing_wrong_was_said()
    fetched = Counter(s["digest"] for s in node.events("fetched"))
    assert set(fetched.values()) == {1}, "each chunk once, however many producers"
    assert len(fetched) >= anchor_chunks()

    for pid in followers:
        kill(pid)
    mirror = open_node_mirror(LAYOUT, run=RUN, node_dir=node.node_dir)
    assert (mirror.state, mirror.alone) == (MirrorState.EMPTY, ""), "the memory went with the last of them"
    mirror.close()


def test_a_stopped_producer_does_not_keep_the_others_from_serving(node: Node) -> None:
    """It may hold a lock; then the others go on with the version they serve, and say whom they wait for."""
    publisher = node.publisher(every_s=0.02)
    followers = [node.follower() for _ in range(2)]
    node.wait("both to serve", lambda: len({s["pid"] for s in node.events("served")}) == 2, publisher, *followers)
    os.kill(followers[0], signal.SIGSTOP)
    served = len(node.events("served", followers[1]))
    mirror = open_node_mirror(LAYOUT, run=RUN, node_dir=node.node_dir)
    if mirror.try_turn():  # it does not hold the turn: the other goes on
        mirror.end_turn()
        node.wait("more", lambda: len(node.events("served", followers[1])) > served, followers[1])
    kill(followers[0])
    node.wait("more", lambda: len(node.events("served", followers[1])) > served + 1, followers[1])
    mirror.close()
    node.assert_nothing_wrong_was_said()


@pytest.mark.timeout(120 + 4 * KILLS)
def test_killed_anywhere_every_survivor_and_every_restart_converges(node: Node) -> None:
    rng = random.Random(int(os.environ.get("ANABRANCH_KILL_SEED", "0")) or None)

    def fuse(*places: str) -> dict[str, Any]:
        """A point of the program at which to die; without one it is killed from outside."""
        where = rng.choice(("outside", "anywhere", *places))
        most = MOST.get(where)
        return {} if most is None else {"die": int(10 ** rng.uniform(0, most)), "where": where}

    def new_follower() -> int:
        return node.follower(**fuse("fetch", "decode", "advance", "advance", "rebuild", "join"))

    def new_publisher() -> int:
        return node.publisher(**fuse("publish"))

    publisher = new_publisher()
    followers = [new_follower() for _ in range(FOLLOWERS)]
    probe = open_node_mirror(LAYOUT, run=RUN, node_dir=node.node_dir)  # the memory outlives them all
    found: Counter[str] = Counter()
    kills = 0
    while kills < KILLS:
        time.sleep(rng.uniform(0.0, 0.2))
        victim = rng.choice([*followers, publisher])
        if rng.random() < 0.4 and is_alive(victim):
            kill(victim)
        for i, pid in enumerate(followers):
            if not is_alive(pid):
                found[probe.state.name] += 1
                kills += 1
                followers[i] = new_follower()
        if not is_alive(publisher):
            kills += 1
            publisher = new_publisher()
        assert "Traceback" not in node.output_text(), node.output_text()

    for pid in [publisher, *followers]:  # some still carry a fuse
        kill(pid)
    last = node.publisher(every_s=0.05)
    node.wait("publishing to go on", lambda: node.events("publishing", last), last)
    followers = [node.follower() for _ in range(FOLLOWERS)]
    node.wait("all to serve", lambda: {s["pid"] for s in node.events("served")} >= set(followers), last, *followers)
    kill(last)
    head = node.channel.head()
    assert head is not None
    node.wait_until_served(str(head), *followers)
    node.assert_nothing_wrong_was_said()
    content = probe.content()
    assert content is not None
    assert content.policy == head
    assert content.digest == probe.digest(), "recomputed in full from the image"
    deaths = Counter(f"{s['where']} in {s['function']}" for s in node.events("dies"))
    print(f"{kills} kills, head {head}; the mirror after a follower's: {dict(found)}; by a fuse: {dict(deaths)}")
    probe.close()
