"""One site of test_region_bytes.py in a process of its own: `python region_site.py ROLE CONFIG.toml`.

Object stores open their sockets on threads of a process-wide runtime, so a site is a process inside its namespace. Commands
come on stdin, one a line; every answer is one line of JSON.
    publisher   "step K": commit K versions; answers with the head
    producers   "grow N": have N followers; "reach E V": wait until all of them serve that version
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from anabranch.producers.lease_keeper import LeaseKeeper
from anabranch.producers.node_mirror import open_node_mirror
from anabranch.producers.weight_follower import WeightFollower
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.log import setup_logging
from anabranch.transport.wiring import connect_hub, connect_weights
from tests.weights import Publisher

LAYOUT = Layout.build([("norm", "f32", (512,)), ("w", "bf16", (1000, 1000))])
DENSITY = 0.1
REACH_S = 40.0


def publish(config: RunConfig) -> None:
    hub = connect_hub(config)
    publisher = Publisher(hub.channel, LAYOUT, run=config.run.name)
    publisher.open()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        payload = sum(publisher.step(DENSITY).payload_bytes for _ in range(int(line.split()[1])))
        assert publisher.head is not None
        print(
            json.dumps({"epoch": publisher.head.epoch, "version": publisher.head.version, "bytes": payload}), flush=True
        )
    hub.close()


class Region:
    """Followers with connections and a mirror of their own, as producers on nodes of their own have."""

    def __init__(self, config: RunConfig, nodes: Path) -> None:
        self.config, self.nodes = config, nodes
        self.followers: list[WeightFollower] = []

    def grow(self, count: int) -> dict[str, Any]:
        with ThreadPoolExecutor(count) as pool:
            self.followers += pool.map(self._follower, range(len(self.followers), count))
        return {"producers": len(self.followers)}

    def _follower(self, number: int) -> WeightFollower:
        config, name = self.config, f"producer-{number}"
        node = self.nodes / name
        node.mkdir(mode=0o700)
        leases = LeaseKeeper(connect_hub(config).channel, name, lease_ms=config.channel.lease_ms)
        leases.start()
        follower = WeightFollower(
            connect_weights(config, "east"), open_node_mirror(LAYOUT, run=config.run.name, node_dir=node),
            run=config.run.name, poll_ms=config.producer.poll_ms, leases=leases,
        )  # fmt: skip
        follower.start()
        return follower

    def reach(self, goal: PolicyVersion) -> dict[str, Any]:
        end = time.monotonic() + REACH_S
        while not all(f.serving is not None and f.serving.policy == goal for f in self.followers):
            for follower in self.followers:
                if (staged := follower.hold()) is not None:
                    follower.confirm(staged)
            if time.monotonic() > end:
                return {"errors": [f"{f.state} {f.last_error}" for f in self.followers]}
            time.sleep(0.01)
        return {"digests": sorted({f.serving.digest for f in self.followers if f.serving is not None})}


def produce(config: RunConfig) -> None:
    with tempfile.TemporaryDirectory() as nodes:
        region = Region(config, Path(nodes))
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            what, *numbers = line.split()
            values = [int(number) for number in numbers]
            answer = region.grow(*values) if what == "grow" else region.reach(PolicyVersion(*values))
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    setup_logging("region site")  # stdout is for answers
    loaded = load_config(Path(sys.argv[2]).read_text(), source=sys.argv[2])
    {"publisher": publish, "producers": produce}[sys.argv[1]](loaded)
