from __future__ import annotations

import subprocess
import sys

from anabranch.schemas.envelope import Envelope
from anabranch.transport.memory_world import MemoryWorld
from tests.streams import put


def test_handles_of_one_world_see_one_run_and_regions_are_apart():
    world = MemoryWorld("r", ["eu", "us"])
    put(world.stream("eu"), Envelope("p", 0, 0, b"x"))
    assert len(world.stream("eu").read("learner", "c", max_entries=9, block_ms=0)) == 1
    assert world.streams()["us"].ledger("learner").produced == 0
    assert world.channel().open_epoch() == 1
    assert world.channel().open_epoch() == 2


def test_its_clock_can_be_set():
    now = [1000.0]
    world = MemoryWorld(clock_ms=lambda: now[0])
    world.permits.reset(epoch=1, version=0, batch=1, max_age=0, total=9, accepted=())
    put(world.stream(), Envelope("p", 0, 0, b"x"))
    world.stream().read("learner", "dead", max_entries=1, block_ms=0)
    assert len(world.permits.take("dead", max_groups=1, lease_ms=60_000)) == 1
    now[0] += 59_999
    assert world.permits.take("alive", max_groups=1, lease_ms=60_000) == []
    assert world.stream().claim_idle("learner", "alive", idle_ms=60_000, max_entries=1) == []
    now[0] += 1
    assert [p.attempt for p in world.permits.take("alive", max_groups=1, lease_ms=60_000)] == [1]
    assert len(world.stream().claim_idle("learner", "alive", idle_ms=60_000, max_entries=1)) == 1


def test_the_twins_need_no_redis():
    code = "import sys, anabranch.transport.memory_world; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", code], timeout=60).returncode == 0
