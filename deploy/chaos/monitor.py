"""The witness of a chaos run: looks at servers and files once a second, in its own way, and remembers.

Invariant: it reads raw commands and raw JSON lines, never through the code that wrote them, and a server that does not answer
costs one look, not the watch. `flows` says when each stream of work was last seen to move ("step", "append:east",
"read:east", "report:east"); `seen` holds the highest sequence number that any server ever acknowledged to a producer, also
one that it forgot since. Held by tests/unit/deploy/chaos/test_monitor.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from anabranch.deploy.chaos.waits import Waits
from anabranch.schemas.keys import LEARNER_GROUP, Keys

LOOK_EVERY_S = 1.0
_AS_THEY_CAME = ("XPENDING", "XINFO STREAM", "XINFO GROUPS", "XRANGE", "XREVRANGE", "XREADGROUP", "XCLAIM")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look: seconds since the watch began, the learner's step, groups pending by region (None: no answer)."""

    at_s: float
    step: int
    pending: dict[str, int | None]


@dataclass
class RegionLook:
    """Running totals of one region, from its server's own counters."""

    added: int = 0
    read: int = 0
    last_entry: str = "0-0"


@dataclass
class Watch:
    samples: list[Sample] = field(default_factory=list)
    flows: dict[str, float] = field(default_factory=dict)  # name -> monotonic time of the latest movement
    seen: dict[tuple[str, str], int] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)  # monotonic times of step records
    waits: Waits = field(default_factory=Waits)
    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)  # "learner", producer id -> latest


class Monitor:
    """A thread; `close` ends it. `urls`: site -> where its server answers this process; `metrics`: the run's file."""

    def __init__(self, run: str, urls: dict[str, str], hub: str, metrics: Path) -> None:
        self.watch = Watch()
        self.began = time.monotonic()
        self._keys, self._hub = Keys(run), hub
        self._clients = {site: client(url) for site, url in urls.items()}
        self._regions = {site: RegionLook() for site in urls if site != hub}
        self._tail = JsonTail(metrics)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-monitor", daemon=True)
        self.failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(20.0)
        for one in self._clients.values():
            one.close()

    def moved_since(self, flow: str, when: float) -> bool:
        return self.watch.flows.get(flow, 0.0) > when

    @property
    def last_step(self) -> int:
        return self.watch.samples[-1].step if self.watch.samples else 0

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a witness that fell asleep must be noticed: the run fails
                self.failure = error
                return

    def look(self) -> None:
        now = time.monotonic()
        self._read_metrics(now)
        pending = {region: self._ask(region, self._look_at_region, region, now) for region in self._regions}
        self._ask(self._hub, self._look_at_hub, now)
        step = self.watch.statuses.get("learner", {}).get("step", 0)
        self.watch.samples.append(Sample(now - self.began, int(step), pending))

    def _ask(self, site: str, look: Callable[..., Any], *args: Any) -> Any:
        try:
            return look(self._clients[site], *args)
        except (redis.RedisError, OSError):
            return None

    def _read_metrics(self, now: float) -> None:
        for record in self._tail.poll():
            if record.get("event") == "step":
                self.watch.flows["step"] = now
                self.watch.steps.append(now)

    def _look_at_region(self, server: redis.Redis, region: str, now: float) -> int | None:
        key, look, flows = self._keys.trajectories, self._regions[region], self.watch.flows
        pipe = server.pipeline(transaction=True)
        pipe.execute_command("XINFO", "STREAM", key)
        pipe.execute_command("XINFO", "GROUPS", key)
        pipe.hgetall(self._keys.seen)
        stream, groups, seen = pipe.execute(raise_on_error=False)
        if isinstance(stream, Exception) or isinstance(groups, Exception):
            return 0 if "no such key" in str(stream) else None
        for producer, seq in seen.items():
            place = (region, producer.decode())
            self.watch.seen[place] = max(self.watch.seen.get(place, 0), int(seq))
        added = int(plain(stream)["entries-added"])
        if added > look.added:
            flows[f"append:{region}"] = now
        learner = next((g for g in map(plain, groups) if g["name"] == LEARNER_GROUP.encode()), None)
        read = int(learner["entries-read"] or 0) if learner else 0
        if read > look.read or (learner and learner["lag"] == 0 and added > look.added):
            flows[f"read:{region}"] = now
        look.added, look.read = added, read
        if learner is None:
            return added
        return int(learner["pending"]) + int(learner["lag"] or 0)

    def _look_at_hub(self, server: redis.Redis, now: float) -> None:
        pipe = server.pipeline(transaction=True)
        pipe.get(self._keys.learner)
        pipe.hgetall(self._keys.producers)
        learner, producers = pipe.execute()
        statuses = {"learner": json.loads(learner)} if learner else {}
        statuses |= {producer.decode(): json.loads(status) for producer, status in producers.items()}
        for name, status in statuses.items():
            before = self.watch.statuses.get(name, {})
            if status.get("updated_ms") != before.get("updated_ms") or status.get("pid") != before.get("pid"):
                self.watch.flows[f"report:{name}"] = now
                if (pid := status.get("pid")) is not None:
                    self.watch.flows[f"report:{pid}"] = now
            self.watch.waits.saw(name, status, now)
        self.watch.statuses |= statuses


class JsonTail:
    """Complete lines of a JSON-lines file that may not exist yet, and may be cut short by who resumes it."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def poll(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                    return []
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                found.append(record)
        return found


def client(url: str, timeout_s: float = 1.0) -> redis.Redis:
    """That waits at most `timeout_s` for anything, never tries twice, and gives stream commands' replies as they came."""
    one = redis.Redis.from_url(
        url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0),
        legacy_responses=False,
    )  # fmt: skip
    for command in _AS_THEY_CAME:
        one.response_callbacks.pop(command, None)
    return one


def plain(reply: Any) -> dict[str, Any]:
    """XINFO's reply, whichever way redis-py gives it."""
    items = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in items}
