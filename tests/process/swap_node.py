"""Producers over one hub and one node folder, as tests/process/test_swap_kills.py starts, watches and kills them; and what of
them may be left on this machine."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.schemas.keys import Keys
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.process.swap_actors import MARKS, RUN, Phase, map_marks
from tests.zygote import Zygote, is_alive, kill

ACTORS = "tests.process.swap_actors"
KV_POLICIES = ("keep", "recompute", "new_requests_only")
OVERDUE_S = 8.0  # a death that has not come by then: killed at any moment
MOST_PRODUCERS = 4096  # of one test


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

    def __init__(self, url: str, folder: Path, zygote: Zygote, rng: random.Random) -> None:
        self.url, self.zygote, self.rng = url, zygote, rng
        self.node_dir, self.log, self.output = folder / "node", folder / "events", folder / "output"
        self.channel = RedisWeightChannel(connect(url, deadline_s=20, what="the hub"), Keys(RUN))
        self.pids: list[int] = []
        self._slots = itertools.count()
        self._marks_file = folder / "marks"
        self._marks_file.write_bytes(bytes(MOST_PRODUCERS * MARKS.itemsize))
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
    """Of this process's group: those that descend from it, and orphans. Another test worker's children are in the group too."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == os.getpgid(0):
                after_the_name = (process / "stat").read_text().rpartition(")")[2].split()
                parents[int(process.name)] = int(after_the_name[1])
        except (ProcessLookupError, FileNotFoundError):
            continue

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid in (1, os.getpid())

    return {pid for pid in parents if is_ours(pid)}
