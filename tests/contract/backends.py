"""The servers a contract suite runs on, and what a test may do to each behind the pipeline's back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import redis

from anabranch.schemas.keys import Keys
from anabranch.transport.dead_letters import DeadLetters
from anabranch.transport.memory_dead_letters import MemoryDeadLetters
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.redis_dead_letters import RedisDeadLetters
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.stream import TrajectoryStream

SERVERS = ("valkey", "redis 7.0")
BACKENDS = ("memory", *SERVERS)


@dataclass
class Backend:
    """`stream()` opens another handle on the same stream, as another process would."""

    name: str
    stream: Callable[..., TrajectoryStream]
    letters: Callable[[], DeadLetters]
    put_raw: Callable[[dict[bytes, bytes]], str]
    dead_letters: Callable[[], list[dict[bytes, bytes]]]
    delete_entry: Callable[[str], object]  # somebody else does
    destroy_group: Callable[[str], object]
    make_group: Callable[[str], object]
    save: Callable[[], Callable[[], None]]  # what it returns brings the server back to where it was
    set_full: Callable[[bool], object]
    size: Callable[[], dict[str, int]]  # of each thing the server keeps


def memory_backend() -> Backend:
    store = MemoryStreamStore()

    def save() -> Callable[[], None]:
        saved = store.save()
        return lambda: store.restore(saved)

    def size() -> dict[str, int]:
        books = store.books
        kept = {"entries": books.entries, "open": books.open, "open ids": books.open_ids, "seen": books.seen}
        return {name: len(value) for name, value in kept.items()}

    return Backend(
        "memory",
        lambda **more: MemoryStream(store, **more),
        lambda: MemoryDeadLetters(store),
        store.add,
        lambda: store.dead_letters,
        lambda entry_id: store.entries.pop(tuple(map(int, entry_id.split("-")))),
        lambda group: store.books.groups.pop(group),
        store.group,
        save,
        lambda full: setattr(store, "max_bytes", int(full) and max(1, store.bytes_used())),
        size,
    )


def redis_backend(name: str, open_client: Callable[[], redis.Redis], keys: Keys) -> Backend:
    client = open_client()
    pattern = f"ab:{keys.run}:*"

    def save() -> Callable[[], None]:
        kept = {key: client.dump(key) for key in client.scan_iter(pattern, count=1000)}

        def restore() -> None:
            for key in client.scan_iter(pattern, count=1000):
                client.delete(key)
            for key, value in kept.items():
                client.restore(key, 0, value)

        return restore

    def size() -> dict[str, int]:
        return {
            "entries": client.xlen(keys.trajectories),
            "open": client.zcard(keys.open_entries),
            "open ids": client.hlen(keys.open_ids),
            "seen": client.hlen(keys.seen),
            "keys": sum(1 for _ in client.scan_iter(pattern, count=1000)),
        }

    return Backend(
        name,
        lambda **more: RedisStream(open_client(), keys, **more),
        lambda: RedisDeadLetters(open_client(), keys),
        lambda fields: client.xadd(keys.trajectories, fields).decode(),
        lambda: [fields for _, fields in client.xrange(keys.dead_letters)],
        lambda entry_id: client.xdel(keys.trajectories, entry_id),
        lambda group: client.xgroup_destroy(keys.trajectories, group),
        lambda group: client.xgroup_create(keys.trajectories, group, id="0"),
        save,
        lambda full: client.config_set("maxmemory", 1 if full else 0),
        size,
    )
