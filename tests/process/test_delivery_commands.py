"""`anabranch dead-letter`, `stream` and `permits` as a user runs them, over two regions on a real Valkey."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from anabranch.schemas.keys import LEARNER_GROUP, RECORDER_GROUP
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_stream import RedisStream
from tests import commands
from tests.groups import entry
from tests.unit.deploy.letter_boxes import HOSTILE, sealed

pytestmark = pytest.mark.process
Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def stream(client, keys) -> RedisStream:
    """Of region east: an entry that is damaged, and one that is too hostile to be shown, are set aside."""
    stream = RedisStream(client, keys)
    stream.append(
        [entry(7, 1, producer="east-0-aa", run=keys.run), entry(8, 2, producer="east-0-aa", run=keys.run)], floor=1
    )
    client.xadd(keys.trajectories, sealed(entry(9), producer=HOSTILE, group=b"9"))
    stream.read(RECORDER_GROUP, "r", max_entries=1, block_ms=0)
    first, _, odd = stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    stream.dead_letter(LEARNER_GROUP, first, "delivered 33 times without being settled")
    stream.dead_letter(LEARNER_GROUP, odd, "bad \x1b[2J")
    return stream


@pytest.fixture
def settings(valkey, keys, tmp_path) -> list[str]:
    """West is a region of the same server's next database, which nobody has used."""
    west = f"{valkey.url.rpartition('/')[0]}/1" if valkey.url.count("/") > 2 else f"{valkey.url}/1"
    return [
        "--set", f"run.name={keys.run}", "--set", f"run.dir={tmp_path}", "--set", f"hub.url={valkey.url}",
        "--set", f"regions.east.url={valkey.url}", "--set", f"regions.west.url={west}",
        "--set", "channel.connect_deadline_s=5",
    ]  # fmt: skip


@pytest.fixture
def anabranch(settings) -> Run:
    return lambda *argv: commands.anabranch(*argv, *settings)


def shown(done: subprocess.CompletedProcess) -> str:
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    return done.stdout


def letters(anabranch: Run) -> list[str]:
    regions = json.loads(shown(anabranch("dead-letter", "ls", "--json")))
    assert regions["west"]["count"] == 0
    return [letter["letter"] for letter in regions["east"]["letters"]]


def test_dead_letters(stream, anabranch, client, keys, tmp_path):
    listed = shown(anabranch("dead-letter", "ls"))
    assert "delivered 33 times without being settled" in listed
    good, odd = letters(anabranch)
    assert "envelope: in order" in shown(anabranch("dead-letter", "show", good))
    assert "\\x1b[2J" in shown(anabranch("dead-letter", "show", odd))
    saved = anabranch("dead-letter", "show", good, "--payload", str(tmp_path / "entry.arrow"))
    assert saved.returncode == 0
    assert (tmp_path / "entry.arrow").read_bytes() == entry(7, run=keys.run, producer="east-0-aa").payload

    assert "the learner reads it" in shown(anabranch("dead-letter", "requeue", "--all", "--dry-run"))
    assert letters(anabranch) == [good, odd]
    assert "1 put back" in shown(anabranch("dead-letter", "requeue", good))
    assert letters(anabranch) == [odd]
    (again,) = stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    assert again.fields == sealed(entry(7, 1, producer="east-0-aa", run=keys.run))
    assert stream.ledger(LEARNER_GROUP).balanced

    gone = anabranch("dead-letter", "requeue", good)
    assert gone.returncode == 1
    assert gone.stderr == f"anabranch dead-letter: no such letter: {good} (in east, west)\n"
    refused = anabranch("dead-letter", "drop", odd)
    assert refused.returncode == 2
    assert "give --yes" in refused.stderr
    assert "1 discarded" in shown(anabranch("dead-letter", "drop", odd, "--yes"))
    assert letters(anabranch) == []
    assert stream.ledger(LEARNER_GROUP).balanced


def test_streams(stream, anabranch):
    listed = shown(anabranch("stream", "ls"))
    assert "nobody has read yet" in listed
    east = json.loads(shown(anabranch("stream", "ls", "--region", "east", "--json")))["east"]
    assert east["entries"] == 3
    assert {g["name"]: (g["undelivered"], g["pending"]) for g in east["groups"]} == {
        "learner": (0, 1),
        "recorder": (2, 1),
    }
    assert anabranch("stream", "forget-group", "learner", "--yes").returncode == 2
    assert "east: group recorder is forgotten" in shown(anabranch("stream", "forget-group", "recorder", "--yes"))
    assert [group.name for group in stream.state().groups] == ["learner"]
    refused = anabranch("stream", "forget-producer", "east-0-aa", "--yes", "--force")
    assert (refused.returncode, "has entries that the learner has not settled" in refused.stderr) == (75, True)
    (left,) = stream.read_own_pending(LEARNER_GROUP, "c", max_entries=9)
    stream.settle(LEARNER_GROUP, [(left.entry_id, "trained")])
    living = anabranch("stream", "forget-producer", "east-0-aa", "--yes")
    assert living.returncode == 75
    assert "producer east-0-aa may live: it appended to region east" in living.stderr
    assert "is forgotten" in shown(anabranch("stream", "forget-producer", "east-0-aa", "--yes", "--force"))


def test_permits(anabranch, client, keys):
    assert "no learner has opened run" in shown(anabranch("permits"))
    permits = RedisPermits(client, keys)
    permits.reset(epoch=1, version=0, batch=4, max_age=1, total=100, accepted=[])
    permits.take("east-0-aa", max_groups=3, lease_ms=60_000)
    state = json.loads(shown(anabranch("permits", "--json")))
    assert (state["epoch"], state["next"], state["limit"], state["leased_by_region"]) == (1, 3, 8, {"east": 3})
    assert "leased: being sampled" in shown(anabranch("permits"))


def test_a_region_that_is_away_is_75_and_the_other_is_shown(stream, settings):
    away = ("--set", "regions.west.url=redis://:s3cret@127.0.0.1:1/0", "--set", "channel.connect_deadline_s=1")
    for argv in (("dead-letter", "ls"), ("stream", "ls")):
        command = [sys.executable, "-I", "-m", "anabranch.cli.main", *argv, *settings, *away]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 75
        assert "east" in done.stdout
        assert "the Redis of region west at redis://:***@127.0.0.1:1/0" in done.stderr
        assert done.stderr.count("\n") == 1


def test_another_run_has_letters_of_its_own(stream, settings):
    other = commands.anabranch("dead-letter", "ls", *settings, "--set", "run.name=another")
    assert shown(other) == "east: 0 dead letters\nwest: 0 dead letters\n"
