"""kill -9 of producers inside the swap of a real engine: whoever survives or starts again computes with the head's bits.

`ANABRANCH_SWAP_KILLS` sets how many kills (12 by default), `ANABRANCH_KILL_SEED` which. Most producers carry their death
with them: at a call that one of their threads makes (the n-th in code that prepares, writes, swaps, fetches, ...), or some
milliseconds after a thread has entered a phase; the others are killed at any time. One lives through it all.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from anabranch.producers.mirror import layout_of_checkpoint
from anabranch.producers.mirror_memory import MirrorState
from anabranch.producers.node_mirror import open_node_mirror
from anabranch.schemas.keys import Keys
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.process.swap_actors import MARKS, MODEL_VARIABLE, RUN, Phase, map_marks
from tests.tiny import build_checkpoint
from tests.zygote import Zygote, is_alive, kill

pytestmark = [pytest.mark.process, pytest.mark.engine]

KILLS = int(os.environ.get("ANABRANCH_SWAP_KILLS", "12"))
VICTIMS = 2  # at a time, beside the one that lives
ACTORS = "tests.process.swap_actors"
KV_POLICIES = ("keep", "recompute", "new_requests_only")
# Calls that a producer makes of that sort in its first second or so, as powers of ten
FUSES = {
    "prepare": 3.2,
    "write": 2.5,
    "swap": 3.0,
    "fetch": 2.5,
    "decode": 3.0,
    "advance": 2.8,
    "rebuild": 2.0,
    "join": 1.5,
}
WATCHED = (
    Phase.PREPARING,
    Phase.SWAPPING,
    Phase.WRITING,
    Phase.FINISHING,
    Phase.VERIFYING,
    Phase.FETCHING,
    Phase.APPLYING,
)
IN_SWAP = {Phase.PREPARING, Phase.SWAPPING, Phase.WRITING, Phase.FINISHING}
OVERDUE_S = 8.0  # a death that has not come by then: killed at any moment


@dataclass
class Producer:
    """A process, and how it is to die: by its own `fuse`, or `delay_s` after a thread enters `phase` for the `nth` time, or
    when `due_s` has come."""

    pid: int
    slot: int
    fuse: dict[str, Any] = field(default_factory=dict)
    phase: Phase | None = None
    nth: int = 0
    delay_s: float = 0.0
    due_s: float = float("inf")


class Node:
    """Producers over one hub and one node folder, and what they have said."""

    def __init__(self, server: EmbeddedValkey, folder: Path, zygote: Zygote, rng: random.Random) -> None:
        self.url, self.zygote, self.rng = server.url, zygote, rng
        self.node_dir, self.log, self.output = folder / "node", folder / "events", folder / "output"
        self.channel = RedisWeightChannel(connect(server.url, deadline_s=20, what="the hub"), Keys(RUN))
        self.pids: list[int] = []
        self._slots = itertools.count()
        self._marks_file = folder / "marks"
        self._marks_file.write_bytes(bytes((KILLS + 64) * MARKS.itemsize))
        self.marks = map_marks(self._marks_file)
        self._said: list[dict[str, Any]] = []
        self._read_bytes = 0

    def publisher(self) -> int:
        return self._spawn("publish", most_ms=120.0)

    def producer(self, **fate: Any) -> Producer:
        slot = next(self._slots)
        places = {"node_dir": str(self.node_dir), "marks": str(self._marks_file), "slot": slot}
        pid = self._spawn("produce", **places, kv_policy=self.rng.choice(KV_POLICIES), **fate.get("fuse", {}))
        return Producer(pid, slot, **{"due_s": time.monotonic() + OVERDUE_S} | fate)

    def _spawn(self, what: str, **kwargs: Any) -> int:
        pid = self.zygote.spawn(f"{ACTORS}:{what}", self.output, url=self.url, log=str(self.log), **kwargs)
        self.pids.append(pid)
        return pid

    def phases(self, producer: Producer) -> tuple[Phase, Phase]:
        """Where its engine's thread is, and its follower's; or where they were."""
        mark = self.marks[producer.slot]
        return Phase(mark["engine"]), Phase(mark["follower"])

    def is_due(self, producer: Producer) -> bool:
        """Whether it is to be killed now."""
        if producer.phase is not None and self.marks["entered"][producer.slot][producer.phase] >= producer.nth:
            producer.phase, producer.due_s = None, time.monotonic() + producer.delay_s
        return time.monotonic() >= producer.due_s

    def events(self, event: str, *pids: int) -> list[dict[str, Any]]:
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read_bytes)
                lines = file.read()
            self._said += map(json.loads, lines.splitlines())
            self._read_bytes += len(lines)
        return [s for s in self._said if s["event"] == event and (not pids or s["pid"] in pids)]

    def wait(self, what: str, ready: Callable[[], bool], *pids: int, deadline_s: float = 60) -> None:
        """Until `ready()`, while `pids` live."""
        end = time.monotonic() + deadline_s
        while not ready():
            self.assert_alive(*pids)
            assert time.monotonic() < end, f"{what} did not come:\n{self.output_text()}"
            time.sleep(0.01)

    def wait_until_served(self, policy: str | None, *pids: int) -> None:
        """`policy`, or any, by all of `pids`."""

        def serve() -> bool:
            return set(pids) <= {s["pid"] for s in self.events("served") if policy in (None, s["policy"])}

        self.wait(f"{policy or 'any version'} to be served by {pids}", serve, *pids)

    def assert_alive(self, *pids: int) -> None:
        assert all(map(is_alive, pids)), f"a process of {pids} ended by itself:\n{self.output_text()}"

    def output_text(self) -> str:
        return self.output.read_text(errors="replace")[-4000:] if self.output.exists() else ""

    def published(self) -> dict[str, str]:
        """Digest of every version, as its publisher said before it committed it."""
        published: dict[str, str] = {}
        for said in self.events("published"):
            assert published.setdefault(said["policy"], said["digest"]) == said["digest"], said
        return published

    def assert_nothing_wrong_was_said(self) -> None:
        """Every version that ever was in the mirror, or in an engine, is one that was published under that name."""
        published = self.published()
        for said in self.events("valid"):
            assert said["digest"] == published[said["policy"]], said
        last: dict[int, PolicyVersion] = {}
        for said in self.events("served"):
            assert said["live"] == published[said["policy"]], f"not what the engine computes with: {said}"
            policy = PolicyVersion.parse(said["policy"])
            before = last.setdefault(said["pid"], PolicyVersion(0, 0))
            assert policy > before, f"an older version after {before}: {said}"
            last[said["pid"]] = policy
        assert {s["alone"] for s in self.events("started")} == {""}

    def close(self) -> None:
        for pid in self.pids:
            if is_alive(pid):
                kill(pid)
        self.channel.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def zygote(model_dir: Path) -> Iterator[Zygote]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODEL_VARIABLE, str(model_dir))
        made = Zygote(f"{ACTORS}:warm_up")
    yield made
    made.close()


def fates(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Ways to die, most of them inside a swap; every one comes in each round, and one inside its writes comes first."""

    def fuse(where: str) -> dict[str, Any]:
        return {"fuse": {"die": int(10 ** rng.uniform(0, FUSES[where])), "where": where}}

    def phase(phase: Phase) -> dict[str, Any]:
        return {"phase": phase, "nth": int(10 ** rng.uniform(0, 1)), "delay_s": rng.uniform(0, 0.02) * rng.random()}

    def any_time() -> dict[str, Any]:
        return {"due_s": time.monotonic() + rng.uniform(0, 1.0)}

    ways: list[Callable[[], dict[str, Any]]] = [any_time]
    ways += [functools.partial(fuse, where) for where in (*FUSES, "prepare", "write", "swap", "swap")]
    ways += [functools.partial(phase, p) for p in WATCHED]
    yield fuse("write")
    while True:
        for way in rng.sample(ways, len(ways)):
            yield way()


def holders_of(memory: os.stat_result) -> list[str]:
    """Descriptors of other processes that lead to that file, as "PID/fd/N"."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        if link.parts[2] == str(os.getpid()):
            continue
        try:
            if os.path.samestat(link.stat(), memory):
                found.append(str(link.relative_to("/proc")))
        except OSError:  # it ended meanwhile
            continue
    return found


def processes_of_this_group() -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == os.getpgid(0):
                found.add(int(process.name))
        except ProcessLookupError:
            continue
    return found


def kill_some(node: Node, ways: Iterator[dict[str, Any]], *survivors: int) -> list[tuple[Phase, Phase]]:
    """Kill `KILLS` producers, and start others in their place; where each of them was, as `Node.phases`."""
    killed: list[tuple[Phase, Phase]] = []
    victims = [node.producer(**next(ways)) for _ in range(VICTIMS)]
    while len(killed) < KILLS:
        time.sleep(0.0003)
        node.assert_alive(*survivors)
        for i, victim in enumerate(victims):
            by_itself = not is_alive(victim.pid)
            if not by_itself and not node.is_due(victim):
                continue
            if by_itself:
                assert node.events("dies", victim.pid), f"a producer ended by itself:\n{node.output_text()}"
            else:
                kill(victim.pid)
            killed.append(node.phases(victim))
            victims[i] = node.producer(**next(ways))
    for victim in victims:
        kill(victim.pid)
    return killed


def report(node: Node, killed: list[tuple[Phase, Phase]]) -> None:
    engine, follower = (Counter(phase.name.lower() for phase in phases) for phases in zip(*killed, strict=True))
    fuses = Counter(said["where"] for said in node.events("dies"))
    published, served = len(node.published()), len(node.events("served"))
    print(
        f"{len(killed)} kills; engine's thread: {dict(engine)}; follower's: {dict(follower)}; by a fuse: {dict(fuses)}"
    )
    print(f"{published} versions published, {served} swaps checked, {len(node.events('valid'))} states of the mirror")


@pytest.mark.timeout(120 + 4 * KILLS)
def test_killed_inside_a_swap_survivors_and_restarts_serve_the_head(
    tmp_path: Path, zygote: Zygote, model_dir: Path
) -> None:
    rng = random.Random(int(os.environ.get("ANABRANCH_KILL_SEED", "0")) or None)
    layout = layout_of_checkpoint(model_dir)
    with EmbeddedValkey(tmp_path / "hub", fsync="everysec") as server:
        processes = processes_of_this_group()
        node = Node(server, tmp_path, zygote, rng)
        try:
            publisher = node.publisher()
            survivor = node.producer().pid
            node.wait_until_served(None, survivor)
            probe = open_node_mirror(layout, run=RUN, node_dir=node.node_dir)  # to look at
            memory = os.stat(probe.path)
            killed = kill_some(node, fates(rng), publisher, survivor)

            restarted = [node.producer().pid for _ in range(VICTIMS)]
            node.wait_until_served(None, *restarted)
            node.assert_alive(publisher)
            kill(publisher)
            head = node.channel.head()
            assert head is not None
            node.wait_until_served(str(head), survivor, *restarted)
            node.assert_nothing_wrong_was_said()
            node.assert_alive(survivor, *restarted)
            published = node.published()
            index = {str(entry.policy): entry.digest for entry in node.channel.index()}
            assert index.items() <= published.items()
            content = probe.content()
            assert content is not None
            assert content.policy == head
            assert content.digest == probe.digest() == published[str(head)], "recomputed in full from the image"
            assert any(engine in IN_SWAP for engine, _ in killed)
            probe.close()
            report(node, killed)
        finally:
            node.close()
        assert holders_of(memory) == []
        assert processes_of_this_group() <= processes
    fresh = open_node_mirror(layout, run=RUN, node_dir=node.node_dir)
    assert (fresh.state, fresh.alone) == (MirrorState.EMPTY, ""), "the memory went with the last of them"
    fresh.close()
