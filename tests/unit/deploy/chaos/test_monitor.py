"""The witness over a real server: what it counts, and what it does when the server does not answer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import redis

from anabranch.deploy.chaos.monitor import JsonTail, Monitor
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey


def watch(valkey: EmbeddedValkey, run: str, metrics: Path, **more: str) -> Monitor:
    return Monitor(run, {"hub": valkey.url, "east": valkey.url, **more}, "hub", metrics)


def test_a_region_moves_when_entries_are_added_and_read(
    valkey: EmbeddedValkey, client: redis.Redis, keys: Keys, run_name: str, tmp_path: Path
) -> None:
    monitor = watch(valkey, run_name, tmp_path / "metrics.jsonl")
    monitor.look()
    assert monitor.watch.samples[-1].pending == {"east": 0}
    assert monitor.watch.flows == {}
    for number in range(3):
        client.xadd(keys.trajectories, {b"n": str(number)})
    client.xgroup_create(keys.trajectories, LEARNER_GROUP, "0")
    start = time.monotonic()
    monitor.look()
    assert monitor.moved_since("append:east", start - 1)
    assert not monitor.moved_since("read:east", start - 1)
    assert monitor.watch.samples[-1].pending == {"east": 3}
    client.xreadgroup(LEARNER_GROUP, "learner-0", {keys.trajectories: ">"}, count=2)
    monitor.look()
    assert monitor.moved_since("read:east", start - 1)
    assert monitor.watch.samples[-1].pending == {"east": 3}, "read is not settled"
    before = time.monotonic()
    monitor.look()
    assert not monitor.moved_since("read:east", before)
    assert not monitor.moved_since("append:east", before)
    monitor.close()


def test_what_a_server_forgot_is_remembered(
    valkey: EmbeddedValkey, client: redis.Redis, keys: Keys, run_name: str, tmp_path: Path
) -> None:
    monitor = watch(valkey, run_name, tmp_path / "metrics.jsonl")
    client.xadd(keys.trajectories, {b"n": b"1"})
    client.hset(keys.seen, "east-0-a", 7)
    monitor.look()
    client.hset(keys.seen, "east-0-a", 5)
    client.hset(keys.seen, "east-1-b", 2)
    monitor.look()
    assert monitor.watch.seen == {("east", "east-0-a"): 7, ("east", "east-1-b"): 2}
    monitor.close()


def test_steps_and_statuses(
    valkey: EmbeddedValkey, client: redis.Redis, keys: Keys, run_name: str, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    monitor = watch(valkey, run_name, metrics)
    metrics.write_text('{"event":"note"}\n{"event":"step","step":1}\n{"event":"step","st')
    client.set(keys.learner, json.dumps({"updated_ms": 1, "step": 1, "epoch": 1, "waiting_for": "8 groups"}))
    client.hset(keys.producers, "east-0-a", json.dumps({"updated_ms": 5, "pid": 77, "region": "east"}))
    monitor.look()
    assert len(monitor.watch.steps) == 1
    assert monitor.last_step == 1
    assert {"step", "report:learner", "report:east-0-a", "report:77"} <= monitor.watch.flows.keys()
    before = time.monotonic()
    monitor.look()
    assert not monitor.moved_since("report:77", before), "the same status is no news"
    client.hset(keys.producers, "east-0-a", json.dumps({"updated_ms": 1, "pid": 77, "region": "east"}))
    monitor.look()
    assert monitor.moved_since("report:77", before), "an earlier time is news too: clocks step"
    monitor.close()


def test_a_server_that_is_away_costs_one_look(valkey: EmbeddedValkey, run_name: str, tmp_path: Path) -> None:
    monitor = watch(valkey, run_name, tmp_path / "metrics.jsonl", west=f"unix://{tmp_path}/nobody.sock")
    monitor.look()
    assert monitor.watch.samples[-1].pending == {"east": 0, "west": None}
    monitor.close()


def test_a_tail_takes_whole_lines_and_starts_again_when_the_file_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = JsonTail(path)
    assert tail.poll() == []
    path.write_text('{"a": 1}\nno json\n[1]\n{"a": 2')
    assert tail.poll() == [{"a": 1}]
    path.write_text('{"a": 1}\nno json\n[1]\n{"a": 2}\n')
    assert tail.poll() == [{"a": 2}]
    path.write_text('{"a": 1}\n')
    assert tail.poll() == []
    path.write_text('{"a": 1}\n{"a": 3}\n')
    assert tail.poll()[-1] == {"a": 3}
