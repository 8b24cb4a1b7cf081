"""Producers without an engine, for tests that kill them: what `tests.zygote` forks. Each puts groups into its outbox as fast
as it accepts them, and says of every one that `put` has returned."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.producers.courier import CourierState
from anabranch.producers.outbox import Outbox
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.schemas.keys import Keys
from anabranch.transport.redis_client import open_client
from anabranch.transport.redis_stream import RedisStream
from tests.groups import group
from tests.process.weight_actors import PLACES, die_after, say
from tests.spools import Rough, section

RUN = "spooled"
REGION = "east"
_SPOOL = ("spool.py", "spool_file.py", "spool_load.py", "transport/files.py")
PLACES.update(
    {
        "put": (_SPOOL, ("append", "_write", "record_header", "_sealed", "add")),
        "file": (_SPOOL, ("_start_segment", "write_atomically", "sync_directory", "_drop_released", "_sync_file")),
        "open": (("spool_slots.py", *_SPOOL), ("claim", "_take", "_open", "load_segments", "scan", "_join")),
        "send": (("courier.py", "sender.py", "redis_stream.py"), ()),
    }
)


def warm_up() -> None:
    """Everything imported that an actor needs."""
    from anabranch.schemas.trajectory import encode_group

    encode_group(group(0))


def put_on(
    folder: str,
    log: str,
    *,
    url: str = "",
    die: int = 0,
    where: str = "",
    groups: int | None = None,
    adopt_after_s: float = 100.0,
    **spool: Any,
) -> None:
    """Put group after group, up to `groups`; then say whether anything is left to do. Without `url` the region is away."""
    if die:
        die_after(die, where, log)
    made = section(**{"max_bytes": 2**22, "segment_bytes": 2**15, "fsync_interval_ms": 20, **spool})
    stream: Any = Rough()
    stream.down = True
    if url:
        stream = RedisStream(open_client(url, deadline_s=1, what="the region"), Keys(RUN))
    slots = SpoolSlots(Path(folder), REGION, made, adopt_after_s=adopt_after_s)
    outbox = Outbox(stream, slots, made, region=REGION, max_entry_bytes=2**20, groups_in_flight=2)
    say(log, event="begins", producer=outbox.producer, waiting=len(outbox))
    outbox.start()
    for number in itertools.count() if groups is None else range(groups):
        while not outbox.accepts:
            outbox.check()
            time.sleep(0.01)
        index = os.getpid() << 20 | number  # no two processes of a test have the same
        text = "x" * (100 << number % 6)
        outbox.put(replace(group(index), prompt_text=text, producer=outbox.producer))
        say(log, event="put", index=index)
        outbox.check()
        if url:
            time.sleep(0.002)
    while True:
        outbox.check()
        done = outbox.sender.courier.state is CourierState.EMPTY and not outbox.sender.adopted
        say(log, event="idle", done=done)
        time.sleep(0.1)
