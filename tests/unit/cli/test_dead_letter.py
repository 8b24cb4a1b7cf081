"""The command over regions in memory: what it says, what it changes, and its exit code."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from anabranch.cli.main import main
from anabranch.schemas.errors import BackpressureError, StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP
from tests.groups import entry
from tests.unit.deploy.letter_boxes import RUN, Box, sealed

Run = Callable[..., tuple[int, str, str]]
CONFIG = (
    '[run]\nname = "run"\ndir = "{dir}"\n[regions.east]\nurl = "redis://h:1"\n[regions.west]\nurl = "redis://h:2"\n'
)


@pytest.fixture
def boxes(monkeypatch) -> dict[str, Box]:
    """A region that is taken out of it is away; so is the hub."""
    boxes = {"east": Box(), "west": Box()}

    def connect(config, region):
        if region not in boxes:
            raise StreamUnavailableError(f"no answer from the Redis of region {region} at redis://u:s3cret@h:1")
        return boxes[region].letters

    def hub(config):
        raise StreamUnavailableError("no answer from the hub's Redis")

    monkeypatch.setattr("anabranch.transport.wiring.connect_dead_letters", connect)
    monkeypatch.setattr("anabranch.deploy.dead_letter_knowledge.connect_hub", hub)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return boxes


@pytest.fixture
def run(tmp_path, boxes, capsys) -> Run:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(dir=tmp_path))

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(["dead-letter", *argv, "--config", str(file)])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_listing_all_regions_or_one(run, boxes):
    boxes["east"].put("checksum mismatch")
    boxes["west"].put("envelope version 9")
    code, out, err = run("ls")
    assert (code, err) == (0, "")
    assert "east: 1 dead letter\nwest: 1 dead letter\n" in out
    assert set(json.loads(run("ls", "--region", "west", "--json")[1])) == {"west"}
    code, _, err = run("ls", "--region", "mars")
    assert (code, err) == (2, "anabranch dead-letter: --region mars: the configuration has east, west\n")


def test_a_region_that_is_away_does_not_hide_the_others(run, boxes):
    boxes["west"].put("checksum mismatch")
    del boxes["east"]
    code, out, err = run("ls")
    assert code == 75
    assert "west: 1 dead letter" in out
    assert err == "anabranch dead-letter: no answer from the Redis of region east at redis://u:***@h:1\n"
    code, out, err = run("drop", "--all", "--yes")
    assert code == 75
    assert boxes["west"].letters.count() == 0
    assert run("show", "5-5")[0] == 75  # it may be in east
    del boxes["west"]
    assert run("ls")[:2] == (75, "")


def test_showing_one(run, boxes, tmp_path):
    fields = sealed(entry(7), xxh3=b"0")
    letter = boxes["west"].put("checksum mismatch", fields)
    code, out, err = run("show", letter, "--payload", str(tmp_path / "payload"))
    assert code == 0
    assert f"letter {letter} in region west" in out
    assert "payload of" in err
    assert (tmp_path / "payload").read_bytes() == fields[b"payload"]
    assert json.loads(run("show", letter, "--json")[1])["region"] == "west"
    code, out, err = run("show", "5-5")
    assert (code, out, err) == (1, "", "anabranch dead-letter: no such letter: 5-5 (in east, west)\n")
    assert run("show", "five")[0] == 2


def test_putting_back(run, boxes):
    letter = boxes["east"].put("delivered 33 times")
    code, out, _ = run("requeue", letter, "--dry-run")
    assert code == 0
    assert "the learner reads it" in out
    assert "1 would be put back into their streams" in out
    assert boxes["east"].letters.count() == 1
    code, out, err = run("requeue", letter, "5-5")
    assert code == 1
    assert "1 put back into their streams" in out
    assert "no such letter: 5-5" in err
    assert "what the learner does is not known: no answer from the hub's Redis" in err
    assert boxes["east"].letters.count() == 0
    assert len(boxes["east"].stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)) == 1


def test_what_has_been_trained_is_known_where_the_run_directory_is(run, boxes, tmp_path):
    boxes["east"].put("delivered 33 times", index=7)
    fates = tmp_path / RUN / "fates"
    fates.mkdir(parents=True)
    line = (
        '{"region":"east","producer":"p","seq":1,"group_index":7,"attempt":0,"fate":"trained","epoch":1,"version":0,"age":0,'
        '"rollouts":2,"tokens":4,"cut":0,"reward":0.5,"time_ms":1}\n'
    )
    (fates / "000001.jsonl").write_text(line)
    assert "dropped:duplicate: its index has been trained" in run("requeue", "--all", "--dry-run")[1]
    (fates / "000001.jsonl").write_text(line.replace("trained", "dropped:age"))
    assert run("requeue", "--all", "--dry-run")[1].splitlines()[1].endswith("the learner reads it")


def test_dropping_asks(run, boxes):
    boxes["east"].put("checksum mismatch")
    code, out, err = run("drop", "--all")
    assert code == 2
    assert "checksum mismatch" in out
    assert "give --yes" in err
    assert run("drop", "--all", "--dry-run")[:1] == (0,)
    assert run("drop", "--all", "--cause", "version", "--yes")[1] == "0 discarded\n"
    assert boxes["east"].letters.count() == 1
    code, out, _ = run("drop", "--all", "--cause", "CHECK", "--yes")
    assert (code, out.splitlines()[-1]) == (0, "1 discarded")
    assert boxes["east"].letters.count() == 0


def test_how_far_it_came_is_told_when_the_server_is_full(run, boxes, monkeypatch):
    for index in range(3):
        boxes["east"].put("delivered 33 times", index=index)
    letters = boxes["east"].letters
    monkeypatch.setattr("anabranch.transport.wiring.connect_dead_letters", lambda config, region: letters)
    requeue = letters.requeue

    def full(letter_id):
        if letters.count() == 1:
            raise BackpressureError("the Redis of region east takes no more data")
        return requeue(letter_id)

    monkeypatch.setattr(letters, "requeue", full)
    code, out, err = run("requeue", "--all", "--region", "east")
    assert code == 75
    assert out.splitlines()[-1] == "2 put back into their streams"
    assert "takes no more data" in err


@pytest.mark.parametrize("argv", [["requeue"], ["drop", "1-0", "--all"], ["drop", "1-0", "--cause", "x"], ["show"]])
def test_a_wrong_command_line_is_2(run, argv):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert "usage: anabranch dead-letter" in err
