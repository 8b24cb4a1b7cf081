"""A publisher's memory is steady: what 50 updates take, 200 take too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.transport.embedded_valkey import EmbeddedValkey

ROOT = Path(__file__).parents[2]
ELEMENTS = 2**21  # 4 MiB of bf16
PROGRAM = f"""
import gc, json, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from anabranch.learner import housekeeper
from anabranch.learner.publish_order import EpochOpening
from anabranch.learner.shares import ArrayShare
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.config import load_config
from anabranch.schemas.layout import Layout
from anabranch.transport.wiring import connect_hub

housekeeper.AGAIN_AFTER_S = 0.05
url, run = sys.argv[1:]
config = load_config("", overrides=[
    f"hub.url={{url}}", f"run.name={{run}}", "channel.retain_bytes=8000000", "channel.skip_memory_bytes=4000000",
])
layout = Layout.build([(f"t{{i}}", "bf16", ({ELEMENTS} // 8,)) for i in range(8)])
rng = np.random.default_rng(0)
state = {{t.name: rng.integers(0, 2**15, t.numel).astype(np.uint16) for t in layout.tensors}}
hub = connect_hub(config)
publisher = WeightPublisher(
    ArrayShare(layout, state), lambda: connect_hub(config), config.channel,
    EpochOpening(run, hub.channel.open_epoch(), 0, 0),
)
publisher.open()

def rss() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

sizes = []
for version in range(1, 201):
    for bits in state.values():
        at = rng.integers(0, bits.size, bits.size // 20)
        bits[at] += 1
    publisher.publish(publisher.next_order(version))
    if version % 50 == 0:
        publisher.drain()
        sizes.append(rss())
entries = [e.label for e in hub.channel.index()]
publisher.close()
print(json.dumps({{"sizes": sizes, "entries": entries, "head": hub.channel.head().version}}))
"""


@pytest.mark.process
def test_two_hundred_updates_take_no_more_memory_than_fifty(valkey: EmbeddedValkey, run_name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, valkey.url, run_name],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["head"] == 200
    assert "skip2" in found["entries"]
    growth = found["sizes"][-1] - found["sizes"][0]
    # One kept snapshot of each update would be 600 MiB, one kept delta of each 25 MiB.
    assert growth < 10 * 2**20, [size >> 20 for size in found["sizes"]]
