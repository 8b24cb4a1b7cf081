"""The command over streams in memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from anabranch.cli.main import main
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP, RECORDER_GROUP
from anabranch.schemas.metrics import ProducerStatus
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.wiring import Hub
from tests.groups import entry

Run = Callable[..., tuple[int, str, str]]
CONFIG = '[regions.east]\nurl = "redis://h:1"\n[regions.west]\nurl = "redis://h:2"\n'


@pytest.fixture
def clock() -> list[float]:
    """Seconds, of both regions."""
    return [100.0]


@pytest.fixture
def hub(monkeypatch) -> Hub:
    world = MemoryWorld("run", ())
    made = Hub(world.channel(), world.permits, world.runs, world.evaluations)
    monkeypatch.setattr("anabranch.transport.wiring.connect_hub", lambda config: made)
    return made


@pytest.fixture
def streams(monkeypatch, clock) -> dict[str, MemoryStream]:
    """West has two groups from producer p, one settled, and a recorder that has read none of them."""
    streams = {name: MemoryStream(MemoryStreamStore(lambda: clock[0])) for name in ("east", "west")}
    streams["west"].append([entry(1, producer="p"), entry(2, producer="p")], floor=1)
    first, _ = streams["west"].read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    streams["west"].settle(LEARNER_GROUP, [(first.entry_id, "trained")])
    streams["west"].read(RECORDER_GROUP, "c", max_entries=1, block_ms=0)

    def connect(config, region):
        if region not in streams:
            raise StreamUnavailableError(f"no answer from the Redis of region {region}")
        return streams[region]

    monkeypatch.setattr("anabranch.transport.wiring.connect_region", connect)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return streams


@pytest.fixture
def run(tmp_path, streams, capsys) -> Run:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(["stream", *argv, "--config", str(file)])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def groups(stream: MemoryStream) -> set[str]:
    return {group.name for group in stream.state().groups}


def test_listing(run, streams):
    code, out, err = run("ls")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["region", "east", "west"]
    west = json.loads(run("ls", "--json", "--region", "west")[1])["west"]
    assert {g["name"]: (g["undelivered"], g["pending"]) for g in west["groups"]} == {
        "learner": (0, 1),
        "recorder": (1, 1),
    }
    del streams["east"]
    code, out, err = run("ls")
    assert code == 75
    assert "\nwest " in out
    assert "region east" in err


def test_forgetting_a_group(run, streams):
    code, out, err = run("forget-group", "recorder")
    assert code == 2
    assert "give --yes" in err
    assert groups(streams["west"]) == {"learner", "recorder"}
    code, out, _ = run("forget-group", "recorder", "--yes")
    assert code == 0
    assert out.splitlines() == [
        "west: group recorder has not read 1 entries, 1 are pending",
        "west: group recorder is forgotten",
    ]
    assert groups(streams["west"]) == {"learner"}
    assert run("forget-group", "recorder", "--yes") == (1, "", "anabranch stream: no group recorder in east, west\n")


def test_the_learners_group_is_refused(run, streams):
    code, out, err = run("forget-group", "learner", "--yes")
    assert (code, out) == (2, "")
    assert "never forgotten" in err
    assert "learner" in groups(streams["west"])


def test_forgetting_a_producer(run, streams, hub, clock):
    code, _, err = run("forget-producer", "p", "--yes", "--force")
    assert code == 75
    assert "from sequence number 2 on" in err
    (left,) = streams["west"].read_own_pending(LEARNER_GROUP, "c", max_entries=9)
    streams["west"].settle(LEARNER_GROUP, [(left.entry_id, "trained")])
    clock[0] += 60
    assert run("forget-producer", "p", "--yes")[1].splitlines()[-1] == "west: producer p is forgotten"
    assert streams["west"].progress("p").next_seq is None
    assert run("forget-producer", "p", "--yes") == (1, "", "anabranch stream: no producer p in east, west\n")


def test_a_living_producer_is_not_forgotten_but_by_force(run, streams, hub, clock):
    (left,) = streams["west"].read_own_pending(LEARNER_GROUP, "c", max_entries=9)
    streams["west"].settle(LEARNER_GROUP, [(left.entry_id, "trained")])
    code, _, err = run("forget-producer", "p", "--yes")
    assert code == 75
    assert "it appended to region west 0 s ago" in err
    clock[0] += 60
    hub.permits.reset(epoch=1, version=0, batch=4, max_age=1, total=100, accepted=[])
    hub.permits.take("p", max_groups=2, lease_ms=60_000)
    hub.runs.report_producer("p", ProducerStatus(updated_ms=1, region="west", pid=1, state="idle", policy=""))
    code, _, err = run("forget-producer", "p", "--yes")
    assert code == 75
    assert "it reported to the hub within the last minute (idle); it holds the leases of 2 groups" in err
    assert streams["west"].progress("p").next_seq == 3
    assert run("forget-producer", "p", "--yes", "--force")[0] == 0
    assert streams["west"].progress("p").next_seq is None


def test_without_the_hub_nobody_knows_whether_it_lives(run, streams, clock, monkeypatch):
    (left,) = streams["west"].read_own_pending(LEARNER_GROUP, "c", max_entries=9)
    streams["west"].settle(LEARNER_GROUP, [(left.entry_id, "trained")])
    clock[0] += 60

    def away(config):
        raise StreamUnavailableError("no answer from the hub's Redis")

    monkeypatch.setattr("anabranch.transport.wiring.connect_hub", away)
    code, _, err = run("forget-producer", "p", "--yes")
    assert code == 75
    assert "is not known: no answer from the hub's Redis" in err
    assert run("forget-producer", "p", "--yes", "--force")[0] == 0


def test_alone_it_shows_its_kinds(capsys):
    assert main(["stream"]) == 2
    assert "forget-producer" in capsys.readouterr().err


def test_a_name_that_is_no_text_is_a_wrong_command_line(run):
    for kind in ("forget-producer", "forget-group"):
        code, out, err = run(kind, "\udcff", "--yes")
        assert (code, out) == (2, "")
        assert "UTF-8" in err
