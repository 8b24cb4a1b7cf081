"""versions.jsonl: one line for each manifest, whatever was cut off before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import structlog

from anabranch.consumers.version_files import digests, read_versions
from anabranch.learner.version_lines import VersionLines
from anabranch.schemas.version_record import VERSIONS_FILE
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_world import MemoryWorld
from tests.publisher_lab import LAYOUT
from tests.publishers import Ranks, change, digest_of, random_state


def publish(tmp_path: Path, world: MemoryWorld, lines: VersionLines | None, *, steps: int = 4, fork: int = 0) -> Ranks:
    rng = np.random.default_rng(fork)
    ranks = Ranks(world, LAYOUT, random_state(LAYOUT, rng), lines=lines, fork_version=fork)
    with ranks:
        ranks.open()
        for _ in range(steps):
            change(ranks.state, rng)
            ranks.publish()
        ranks.drain()
    return ranks


def names(folder: Path) -> list[tuple[int, str]]:
    return [(record.version, record.label) for record in read_versions(folder)]


def test_every_manifest_has_its_line_and_steps_say_how_long_they_took(tmp_path: Path):
    world = MemoryWorld("run")
    ranks = publish(tmp_path, world, VersionLines(tmp_path / VERSIONS_FILE))
    entries = {(e.policy.version, e.label): e.digest for e in world.channel().index()}
    found = read_versions(tmp_path)
    assert {(r.version, r.label): r.result_digest for r in found} == entries
    assert any(r.label.startswith("skip") for r in found)
    for record in found:
        assert (record.commit_s is None) == record.label.startswith("skip"), record
    assert digests(tmp_path)[PolicyVersion(ranks.epoch, 4)] == digest_of(LAYOUT, ranks.state)


def test_an_epoch_that_forks_is_told_of_too(tmp_path: Path):
    world, lines = MemoryWorld("run"), VersionLines(tmp_path / VERSIONS_FILE)
    publish(tmp_path, world, lines, steps=2)
    publish(tmp_path, world, lines, steps=1, fork=2)
    assert [(r.epoch, r.version) for r in read_versions(tmp_path) if not r.label.startswith("skip")] == [
        (1, 0), (1, 1), (1, 2), (2, 2), (2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [1, 30])
def test_what_a_crash_kept_from_the_file_is_told_at_the_next_start(tmp_path: Path, cut: int):
    """The last lines are cut in the middle, as if the machine had died."""
    world, path = MemoryWorld("run"), tmp_path / VERSIONS_FILE
    publish(tmp_path, world, VersionLines(path), steps=3)
    whole = names(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    assert names(tmp_path) != whole
    VersionLines(path).catch_up(world.channel())
    assert sorted(names(tmp_path)) == sorted(whole)
    lines = path.read_bytes().splitlines()
    assert len(lines) == len(whole) + 1, "the torn line stands by itself"
    assert [json.loads(line)["label"] for line in lines if line.endswith(b"}")]


def test_nothing_is_told_twice(tmp_path: Path):
    world, path = MemoryWorld("run"), tmp_path / VERSIONS_FILE
    publish(tmp_path, world, VersionLines(path), steps=3)
    before = path.read_bytes()
    VersionLines(path).catch_up(world.channel())
    assert path.read_bytes() == before


def test_an_epoch_that_opens_tells_what_the_one_before_could_not(tmp_path: Path):
    world, path = MemoryWorld("run"), tmp_path / VERSIONS_FILE
    publish(tmp_path, world, None, steps=2)
    publish(tmp_path, world, VersionLines(path), steps=0, fork=2)
    told = {(r.epoch, r.version) for r in read_versions(tmp_path)}
    assert told == {(1, 0), (1, 1), (1, 2), (2, 2)}


def test_a_manifest_that_nobody_can_read_costs_its_line_and_no_start(tmp_path: Path):
    world, path = MemoryWorld("run"), tmp_path / VERSIONS_FILE
    publish(tmp_path, world, None, steps=3)
    store = world.channel()._store
    store.manifests[PolicyVersion(1, 1), "delta"] = "damaged"
    publish(tmp_path, world, VersionLines(path), steps=1, fork=3)
    told = {(r.epoch, r.version) for r in read_versions(tmp_path) if not r.label.startswith("skip")}
    assert told == {(1, 0), (1, 2), (1, 3), (2, 3), (2, 4)}


def test_a_folder_in_the_place_of_the_file_fails_no_publication_and_is_told_of_once(tmp_path: Path):
    world = MemoryWorld("run")
    (tmp_path / VERSIONS_FILE).mkdir()
    with structlog.testing.capture_logs() as logs:
        publish(tmp_path, world, VersionLines(tmp_path / VERSIONS_FILE), steps=2)
    assert max(e.policy.version for e in world.channel().index()) == 2
    assert [log["event"] for log in logs].count("versions are not told of") == 1


def test_a_manifest_that_is_handed_over_again_has_one_line(tmp_path: Path):
    world, path = MemoryWorld("run"), tmp_path / VERSIONS_FILE
    publish(tmp_path, world, VersionLines(path), steps=1)
    before = path.read_bytes()
    channel = world.channel()
    again = channel.manifests([(entry.policy, entry.label) for entry in channel.index()])
    for lines in (VersionLines(path), VersionLines(tmp_path / "other" / VERSIONS_FILE)):
        for manifest in [*again, *again]:
            lines.append(manifest)
    assert path.read_bytes() == before
    assert len((tmp_path / "other" / VERSIONS_FILE).read_bytes().splitlines()) == len(again)


def test_a_file_that_cannot_be_written_fails_no_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = VersionLines(tmp_path / VERSIONS_FILE)
    world = MemoryWorld("run")
    real = os.write
    full = True

    def write(fd: int, data: bytes) -> int:
        return real(fd, data[:7]) if full else real(fd, data)

    monkeypatch.setattr("anabranch.learner.version_lines.os.write", write)
    publish(tmp_path, world, lines, steps=2)
    assert len(world.channel().index()) >= 3
    full = False
    lines.catch_up(world.channel())
    assert len(names(tmp_path)) == len(world.channel().index())
