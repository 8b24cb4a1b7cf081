"""kill -9 of a publishing learner at random points: what is on the channel is always whole, and the next learner goes on.

`ANABRANCH_KILLS` sets how many kills (16 by default), `ANABRANCH_KILL_SEED` which.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.kernels.delta_dtypes import uint_dtype
from anabranch.schemas.keys import Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.weight_path import cheapest_path
from tests.process.learner_actor import LAYOUT, RUN
from tests.publishers import State, apply
from tests.zygote import Zygote, is_alive, kill

pytestmark = pytest.mark.process
KILLS = int(os.environ.get("ANABRANCH_KILLS", "16"))
MOST = {"anywhere": 4.5, "encode": 3.5, "store": 3.0, "commit": 3.5, "background": 3.0}  # calls, as powers of ten
ACTOR = "tests.process.learner_actor"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote(f"{ACTOR}:warm_up")
    yield made
    made.close()


def events(log: Path, event: str) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [said for line in lines if (said := json.loads(line))["event"] == event]


def wait(ready: Any, what: str, output: Path, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not ready():
        assert time.monotonic() < end, f"{what}\n{output.read_text(errors='replace')[-3000:]}"
        time.sleep(0.01)


def check(channel: RedisWeightChannel, *, everything: bool = False) -> None:
    """The head can be reached from nothing, by manifests that say the truth; `everything`: so can all that is there, by
    all ways."""
    entries, head = channel.index(), channel.head()
    if head is None:
        assert entries == []
        return
    empty = {t.name: np.zeros(t.numel, uint_dtype(t.dtype)) for t in LAYOUT.tensors}
    state: State = {n: b.copy() for n, b in empty.items()}
    path = cheapest_path(entries, None, head)
    assert path, f"no way to {head}"
    for entry in path:
        apply(channel, LAYOUT, entry, state)
    if not everything:
        return
    states: dict[Any, State] = {}
    for entry in entries:
        if entry.base is not None and entry.base not in states:
            continue  # its base went by retention
        state = {n: b.copy() for n, b in (empty if entry.base is None else states[entry.base]).items()}
        apply(channel, LAYOUT, entry, state)
        states[entry.policy] = state
    assert head in states


@pytest.mark.timeout(120 + 6 * KILLS)
def test_a_killed_learner_leaves_a_whole_channel_and_the_next_goes_on(tmp_path: Path, zygote: Zygote) -> None:
    random.seed(os.environ.get("ANABRANCH_KILL_SEED"))
    log, output = tmp_path / "events", tmp_path / "output"
    with EmbeddedValkey(tmp_path / "hub", fsync="everysec") as server:
        channel = RedisWeightChannel(connect(server.url, deadline_s=20, what="the hub"), Keys(RUN))
        arguments = {"url": server.url, "folder": str(tmp_path), "log": str(log)}
        places: Counter[str] = Counter()
        for number in range(KILLS):
            where = random.choice([*MOST, "outside"])
            stepped = len(events(log, "stepped"))
            if where == "outside":
                pid = zygote.spawn(f"{ACTOR}:learn", output, **arguments)
                wait(lambda: len(events(log, "stepped")) > stepped + 1, "the learner takes no step", output)  # noqa: B023
                time.sleep(random.uniform(0, 0.2))
                kill(pid)
            else:
                die = int(10 ** random.uniform(0, MOST[where]))
                pid = zygote.spawn(f"{ACTOR}:learn", output, die=die, where=where, steps=40, **arguments)
                wait(lambda: not is_alive(pid), f"kill {number}: the learner neither died nor ended", output)  # noqa: B023
            places[where] += 1
            check(channel)
        pid = zygote.spawn(f"{ACTOR}:learn", output, steps=20, **arguments)
        wait(lambda: not is_alive(pid), "the last learner does not end", output)
        assert events(log, "ended"), output.read_text(errors="replace")[-3000:]
        check(channel, everything=True)
        head, last = channel.head(), events(log, "ended")[-1]
        assert head is not None
        assert head.version == last["version"]
        channel.close()
    died = events(log, "dies")
    assert len(died) + places["outside"] > KILLS // 2, "most fuses were too long to kill anything"
    text = output.read_text(errors="replace") if output.exists() else ""
    assert "Traceback" not in text, text[-3000:]
    kinds = Counter(said["kind"] for said in events(log, "opened"))
    assert kinds["fork"] > 0, kinds
