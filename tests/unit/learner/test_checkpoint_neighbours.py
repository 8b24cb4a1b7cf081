"""What somebody else put among the checkpoints: never destroyed where it is elsewhere, never in the way of a new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.learner import checkpoint_folder, universal
from anabranch.learner.checkpoint_folder import MARKER, read_marker
from anabranch.learner.universal import make_universal
from anabranch.schemas.errors import CheckpointError, TemporaryError
from tests.checkpoint_stores import Counter, store


def test_a_link_to_a_checkpoint_elsewhere_goes_alone(tmp_path: Path):
    """Somebody's backup, linked to resume from, is still a checkpoint when the run has gone on."""
    place = store(tmp_path, keep=1).save(Counter(1), {"n": 1})
    backup = tmp_path / "backup"
    place.rename(backup)
    place.symlink_to(backup)
    store(tmp_path, keep=1).save(Counter(2), {})
    assert [p.name for p in place.parent.iterdir()] == ["step-00000002"]
    assert read_marker(backup).step == 1
    assert (backup / "deep" / "state.pt").read_text() == "1"


def test_files_that_have_the_name_of_a_checkpoint_do_not_keep_old_ones(tmp_path: Path):
    old = store(tmp_path, keep=1).save(Counter(1), {})
    (old.parent / "step-00000000").write_text("notes")
    store(tmp_path, keep=1).save(Counter(2), {})
    assert not old.exists()


def test_a_dangling_link_that_has_the_name_of_the_new_one(tmp_path: Path):
    directory = tmp_path / "check points"
    directory.mkdir()
    (directory / "step-00000001").symlink_to(tmp_path / "gone")
    assert store(tmp_path).save(Counter(1), {"n": 1}).name == "step-00000001.1"
    assert store(tmp_path).load_newest(Counter()) == {"n": 1}


def test_one_old_checkpoint_that_cannot_be_removed_does_not_keep_the_others(tmp_path: Path, monkeypatch):
    first, second = (store(tmp_path, keep=2).save(Counter(step), {}) for step in (1, 2))
    remove = checkpoint_folder.shutil.rmtree

    def refused(path: Path) -> None:
        if path == first:
            raise PermissionError(13, "not yours", str(path))
        remove(path)

    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", refused)
    store(tmp_path, keep=1).save(Counter(3), {})
    assert first.exists()
    assert not second.exists()


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_what_looks_like_a_leftover_and_is_no_folder(tmp_path: Path, kind: str):
    directory, elsewhere = tmp_path / "check points", tmp_path / "elsewhere"
    directory.mkdir()
    leftover = directory / ".step-00000001.tmp"
    if kind == "file":
        leftover.write_text("")
    else:
        leftover.symlink_to(elsewhere)
    if kind == "link":
        elsewhere.mkdir()
        (elsewhere / "kept").touch()
    store(tmp_path).save(Counter(1), {})
    assert [p.name for p in directory.iterdir()] == ["step-00000001"]
    assert kind != "link" or (elsewhere / "kept").exists()


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b"1" * 10_000, b'{"format": "x' + b" " * 2**24 + b'"}'], ids=["deep", "digits", "large"]
)
def test_a_marker_of_huge_json(tmp_path: Path, content: bytes):
    place = store(tmp_path).save(Counter(1), {})
    (place / MARKER).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"COMPLETE\.json is damaged"):
        store(tmp_path).load_newest(Counter())


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch):
    store(tmp_path).save(Counter(1), {})

    def unreadable(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_folder, "size_and_digest", unreadable)
    with pytest.raises(CheckpointError, match=r"client.json cannot be read: .*Permission denied.*--give-up-above 0"):
        store(tmp_path).load_newest(Counter())


def test_a_disk_that_is_full_before_a_conversion_begins(tmp_path: Path, monkeypatch):
    place = store(tmp_path).save(Counter(1), {})

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(universal.Path, "mkdir", full)
    with pytest.raises(TemporaryError, match="make room"):
        make_universal(place)


def test_a_source_of_huge_json_makes_a_conversion_count_for_nothing(tmp_path: Path):
    place = store(tmp_path).save(Counter(1), {})
    made = universal.universal_folder(place)
    made.mkdir()
    (made / MARKER).touch()
    (made / universal.SOURCE_FILE).write_bytes(b"[" * 200_000)
    assert not universal.is_universal(place)


def test_a_disk_that_is_full_when_it_should_be_marked_has_its_room_again(tmp_path: Path, monkeypatch):
    """An unmarked folder, which nobody sees, would be in the way of the next attempt."""
    first = store(tmp_path).save(Counter(1), {"n": 1})

    def full(path: Path, _: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "write_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            store(tmp_path).save(Counter(2), {})
    assert list(first.parent.iterdir()) == [first]
    assert store(tmp_path).load_newest(Counter()) == {"n": 1}
