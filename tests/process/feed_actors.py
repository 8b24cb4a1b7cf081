"""A learner without a model, as a process of its own, for tests that kill it: what `tests.zygote` forks. Its feed, fate log and
acknowledgements are the real ones, its checkpoint is one file, its permits are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anabranch.consumers.fate_files import FATES_DIRECTORY
from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.reader import Reader
from anabranch.learner.feed import Feed
from anabranch.schemas.config import StreamSection
from anabranch.schemas.errors import DeadlineError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.files import write_atomically
from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.redis_client import open_client
from anabranch.transport.redis_stream import RedisStream
from tests.process.weight_actors import PLACES, die_after, say

RUN = "fed"
BATCH = 4
MAX_AGE = 3
STREAM = StreamSection(block_ms=10, socket_timeout_ms=2000)
_FEED = ("learner/feed.py", "fate_book.py")
PLACES.update(
    {
        "log": (("fate_log.py", "fate_files.py", "schemas/fates.py"), ()),
        "feed": (_FEED, ("checkpointed", "end", "flush", "_settle", "consumed", "_drop", "_poll", "again")),
        "settle": (("region_reader.py", "redis_stream.py"), ("_settle_some", "settle", "_settle_what_is_due", "trim")),
        "checkpoint": (
            ("transport/files.py", "feed_actors.py", *_FEED),
            ("write_atomically", "checkpoint", "checkpointed"),
        ),
        "read": (("region_reader.py", "redis_stream.py", "arrivals.py"), ()),
    }
)


def warm_up() -> None:
    """Everything imported that an actor needs."""
    from anabranch.schemas.trajectory import decode_group, encode_group
    from tests.groups import group

    decode_group(encode_group(group(0)))


def learn(
    urls: dict[str, str],
    folder: str,
    log: str,
    die: int = 0,
    where: str = "",
    checkpoint_every: int = 2,
    end: bool = False,
) -> None:
    """Steps for as long as it lives, each a version further; with `end` until nothing more comes, and then the rest is
    surplus."""
    root = Path(folder)
    if die:
        die_after(die, where, log)
    path = root / "checkpoint.json"
    saved: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {"version": 0, "forks": {}, "feed": {}}
    epoch = len(list(root.glob("epoch-*"))) + 1
    (root / f"epoch-{epoch}").touch()
    version, state = int(saved["version"]), saved["feed"]
    forks = {int(e): int(v) for e, v in saved["forks"].items()} | {epoch: version}
    fates = FateLog(root / FATES_DIRECTORY, file_lines=50, since=state.get("fate_log"))
    streams = {
        name: RedisStream(open_client(url, stream=STREAM, deadline_s=5.0, what=name), Keys(RUN))
        for name, url in urls.items()
    }
    reader = Reader(streams, run=RUN, group=LEARNER_GROUP, consumer="learner-0", config=STREAM)
    feed = Feed(
        reader,
        MemoryPermits(RUN),
        fates,
        batch_groups=BATCH,
        max_age=MAX_AGE,
        block_ms=20,
        hub_deadline_s=1,
        resumed=state,
    )

    durable: list[
        dict[str, Any]
    ] = []  # and not told to the feed yet: a checkpoint in the background, at every other start

    def settle() -> None:
        while durable:
            feed.checkpointed(durable.pop())

    def checkpoint() -> None:
        settle()
        state = feed.state()
        write_atomically(path, json.dumps({"version": version, "forks": forks, "feed": state}).encode())
        durable.append(state)
        if epoch % 2:
            settle()

    checkpoint()
    say(log, event="opened", epoch=epoch, version=version)
    feed.drain_backlog(PolicyVersion(epoch, version), forks)
    while True:
        try:
            batch = feed.next_batch(PolicyVersion(epoch, version), forks, deadline_s=1.0 if end else 60.0)
        except DeadlineError:
            if not end or reader.unreachable():
                continue
            break
        assert batch is not None
        feed.consumed(batch.arrivals, zero_variance=[a.group.group_index for a in batch.arrivals if a.seq % 5 == 0])
        version += 1
        if version % checkpoint_every == 0:
            checkpoint()
        else:
            settle()
        say(log, event="stepped", epoch=epoch, version=version)
    checkpoint()
    settle()
    feed.drop_surplus(PolicyVersion(epoch, version), forks)
    feed.close()
    say(log, event="ended", epoch=epoch, version=version)
