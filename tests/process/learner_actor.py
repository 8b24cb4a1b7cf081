"""A learner of two ranks without a model, as a process of its own, for tests that kill it: what `tests.zygote` forks. Its
state is random, its checkpoints are files; what it publishes goes the whole way of the real one."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np

from anabranch.schemas.keys import Keys
from anabranch.schemas.layout import Layout
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.wiring import Hub
from tests.process.weight_actors import PLACES, die_after, say
from tests.publishers import Ranks, State, change, random_state

LAYOUT = Layout.build([("a.weight", "bf16", (200, 300)), ("b.norm", "f32", (500,))])
RUN = "killed-learner"
CHECKPOINT_EVERY = 3
PLACES.update(
    {
        "encode": (("share_publishing.py", "version_history.py", "delta_codec.py"), ()),
        "store": (("uploads.py", "redis_blob_store.py"), ()),
        "commit": (("commits.py", "redis_weight_channel.py"), ()),
        "background": (("compactor.py", "housekeeper.py"), ()),
    }
)


def warm_up() -> None:
    with Ranks(MemoryWorld(RUN), LAYOUT, random_state(LAYOUT, np.random.default_rng(0)), world_size=2) as ranks:
        ranks.open()
        for _ in range(4):
            change(ranks.state, np.random.default_rng(0))
            ranks.publish(anchor=True)
        ranks.drain()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(10)
    assert threading.active_count() == 1, threading.enumerate()


def learn(url: str, folder: str, log: str, die: int = 0, where: str = "anywhere", steps: int = 10**9) -> None:
    """Resume from the newest checkpoint; publish `steps` versions, some as fast as they are taken, some one by one."""

    def connected() -> Hub:
        channel = RedisWeightChannel(connect(url, deadline_s=20, what="the hub"), Keys(RUN))
        return cast(Hub, _HubOfChannel(channel))

    if die:
        die_after(die, where, log)
    rng = np.random.default_rng(random.randrange(2**31))
    version, state = _load(Path(folder)) or (0, random_state(LAYOUT, rng))
    hub = connected()
    epoch = hub.channel.open_epoch()
    ranks = Ranks(
        MemoryWorld(RUN), LAYOUT, state, world_size=2, epoch=epoch, fork_version=version, connect=connected,
        skip_levels=3, retain_bytes=1_500_000, connect_deadline_s=20.0,
    ).open()  # fmt: skip
    assert ranks.lead.published is not None
    say(log, event="opened", version=version, kind=ranks.lead.published.manifest.kind)
    _save(Path(folder), version, state)
    for step in range(1, steps + 1):
        change(state, rng)
        if random.random() < 0.3:
            ranks.publish()
        else:
            ranks.hand_over()
        if ranks.version % CHECKPOINT_EVERY == 0:
            _save(Path(folder), ranks.version, state)
        say(log, event="stepped", version=ranks.version, step=step)
    ranks.lead.flush()
    ranks.drain()
    ranks.close()
    say(log, event="ended", version=ranks.version)


class _HubOfChannel:
    def __init__(self, channel: RedisWeightChannel) -> None:
        self.channel = channel

    def close(self) -> None:
        self.channel.close()


def _save(folder: Path, version: int, state: State) -> None:
    path = folder / f"checkpoint-{version:06}.npz"
    with path.with_suffix(".new").open("wb") as file:
        np.savez(file, **cast(Any, state))
    path.with_suffix(".new").replace(path)
    for old in sorted(folder.glob("checkpoint-*.npz"))[:-2]:
        old.unlink(missing_ok=True)


def _load(folder: Path) -> tuple[int, State] | None:
    newest = max(folder.glob("checkpoint-*.npz"), default=None)
    if newest is None:
        return None
    with np.load(newest) as stored:
        return int(newest.stem.split("-")[1]), {name: stored[name].copy() for name in stored.files}
