"""What faults act upon: the processes, links, disks, clocks and servers of a chaos run, by name.

Invariant: names are those of deploy/chaos/place.py; talking to a server from here takes at most two seconds and never goes
through a link. Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cached_property

import redis

from anabranch.deploy.aof_holes import close_holes
from anabranch.deploy.chaos.links import Link
from anabranch.deploy.chaos.log_sizes import LogSizes, newest_log
from anabranch.deploy.chaos.monitor import Monitor, client
from anabranch.deploy.chaos.place import RUN, Place, server_name
from anabranch.deploy.chaos.sites import HUB
from anabranch.deploy.child import Child, ChildState
from anabranch.schemas.errors import AppendOnlyFileError
from anabranch.schemas.keys import Keys
from anabranch.transport.redis_stream import RedisStream

TIMEOUT_S = 2.0
_BAD_FILE = "Bad file format reading the append only file"


class Lab:
    def __init__(
        self, place: Place, links: Mapping[str, Link], children: Mapping[str, Child], monitor: Monitor
    ) -> None:
        self.place, self.links, self.children, self.monitor = place, links, children, monitor
        self.regions = place.sites.regions
        self.keys = Keys(RUN)
        self.log_sizes = LogSizes({server_name(site): place.server_data(site) for site in place.sites.names})
        self.mended: list[tuple[str, int]] = []  # (server, zero bytes dropped from its append-only file)
        self.injected: dict[str, set[str]] = {region: set() for region in self.regions}  # entry ids that faults added

    @cached_property
    def servers(self) -> dict[str, redis.Redis]:
        return {site: client(self.place.url(site), TIMEOUT_S) for site in self.place.sites.names}

    @cached_property
    def streams(self) -> dict[str, RedisStream]:
        """The real scripts, for faults that add entries."""
        return {
            region: RedisStream(
                client(self.place.url(region), TIMEOUT_S), self.keys,
                max_entry_bytes=self.place.config.stream.max_entry_bytes, what=f"the Redis of region {region}",
            )
            for region in self.regions
        }  # fmt: skip

    def mend_servers(self) -> None:
        """What a person would do whose server does not start any more after a full disk (deploy/aof_holes.py)."""
        for name in self.place.servers:
            child = self.children.get(name)
            if child is None or child.alive or not any(_BAD_FILE in line for line in child.log_tail(3)):
                continue
            found = newest_log(self.place.server_data(self.place.site_of(name)))
            with contextlib.suppress(AppendOnlyFileError, OSError):  # then it stays down, and the verdict says so
                self.mended += [(name, size) for _, size in close_holes(found[0])] if found else []

    def alive(self, name: str) -> bool:
        """Running, and has reported itself since its start (a server: answers)."""
        child = self.children[name]
        if child.state is not ChildState.RUNNING:
            return False
        if name in self.place.servers:
            return self.answers(self.place.site_of(name))
        return child.silent_s is not None

    def answers(self, site: str) -> bool:
        try:
            return bool(self.servers[site].ping())
        except (redis.RedisError, OSError):
            return False

    def flows_of(self, target: str) -> tuple[str, ...]:
        """What must move for `target` (a child, a region, a disk, "all") to be at work."""
        kind, _, region = target.rpartition("-")
        if target in self.regions:
            kind, region = "redis", target
        if region in self.regions:
            flows = [f"append:{region}", f"read:{region}"]
            pid = self.children[f"producer-{region}"].pid
            return (*flows, f"report:{pid}") if kind == "producer" else tuple(flows)
        if target == "recorder":
            return ()
        if target == "all":
            return ("step", "report:learner", *(f"append:{r}" for r in self.regions))
        return ("step", "report:learner")

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        if "streams" in self.__dict__:
            for stream in self.streams.values():
                stream.close()


__all__ = ["HUB", "Lab"]
