"""What is made aside appears whole or not at all, and one process makes it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from anabranch.schemas.errors import TemporaryError, UsageError
from anabranch.transport.aside import Aside, refuse_existing


def test_a_file_appears_with_commit(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with Aside(target) as aside:
        aside.path.write_bytes(b"content")
        assert not target.exists()
        aside.commit()
    assert target.read_bytes() == b"content"
    assert os.listdir(tmp_path) == ["made"]
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("folder", [False, True])
def test_without_commit_nothing_is_left(tmp_path: Path, folder: bool) -> None:
    def interrupted() -> None:
        with Aside(tmp_path / "x", folder=folder) as aside:
            (aside.path / "inner" if folder else aside.path.parent / "other").mkdir()
            (aside.path / "inner" / "half" if folder else aside.path).write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == ([] if folder else ["other"])


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("call", ["open", "mkdir", "unlink", "rmdir", "rename"])
def test_a_signal_waits_for_what_must_be_done_in_one(
    tmp_path: Path, folder: bool, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes while the folder was made and is not locked yet, or is being removed."""
    real = getattr(os, call)

    def interrupted(*args: object, **options: object) -> object:
        done = real(*args, **options)
        monkeypatch.setattr(os, call, real)
        signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(os, call, interrupted)

    def make(*, commit: bool) -> None:
        with Aside(tmp_path / "x", folder=folder) as aside:
            if commit:
                aside.commit()

    with contextlib.suppress(KeyboardInterrupt):
        make(commit=call == "rename")
    assert os.listdir(tmp_path) == (["x"] if call == "rename" else [])


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".file.part").write_bytes(b"left over")
    with Aside(tmp_path / "file") as aside:
        assert aside.path.read_bytes() == b""
        aside.commit()
    (tmp_path / ".folder.part").mkdir()
    (tmp_path / ".folder.part" / "left").write_bytes(b"over")
    with Aside(tmp_path / "folder", folder=True) as aside:
        aside.commit()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("folder", [False, True])
def test_a_rival_is_told_to_wait_and_takes_nothing_away(tmp_path: Path, folder: bool) -> None:
    with Aside(tmp_path / "x", folder=folder) as first:
        with pytest.raises(TemporaryError, match="another process"), Aside(tmp_path / "x", folder=folder):
            pass
        assert first.path.exists()
        first.commit()


@pytest.mark.parametrize("folder", [False, True])
def test_replacing_is_asked_for(tmp_path: Path, folder: bool) -> None:
    target = tmp_path / "x"
    target.mkdir() if folder else target.write_bytes(b"old")
    if folder:
        (target / "old").write_bytes(b"old")
    with pytest.raises(UsageError, match="--force"), Aside(target, folder=folder) as aside:
        aside.commit()
    with pytest.raises(UsageError, match="remove it first"), Aside(target, folder=not folder) as aside:
        aside.commit(replace=True)
    with Aside(target, folder=folder) as aside:
        if folder:
            (aside.path / "new").write_bytes(b"new")
        else:
            aside.path.write_bytes(b"new")
        aside.commit(replace=True)
    assert os.listdir(tmp_path) == ["x"]
    assert (os.listdir(target) == ["new"]) if folder else (target.read_bytes() == b"new")


def test_a_folder_is_replaced_where_two_cannot_be_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x"
    target.mkdir()
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    with Aside(target, folder=True) as aside:
        (aside.path / "new").write_bytes(b"new")
        aside.commit(replace=True)
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(target) == ["new"]


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"), Aside(tmp_path / "nowhere" / "x"):
        pass


def test_the_working_directory_is_no_name() -> None:
    with pytest.raises(UsageError, match="no name"):
        Aside(Path())


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("nowhere")
    with pytest.raises(UsageError, match="exists"):
        refuse_existing(tmp_path / "x", replace=False, folder=False)


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_stays_and_its_target_is_made(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "x").symlink_to("disk/real")
    if exists:
        (tmp_path / "disk" / "real").write_bytes(b"old")
    with Aside(tmp_path / "x") as aside:
        aside.path.write_bytes(b"new")
        aside.commit(replace=True)
    assert os.readlink(tmp_path / "x") == "disk/real"
    assert (tmp_path / "disk" / "real").read_bytes() == b"new"
    assert os.listdir(tmp_path / "disk") == ["real"]


def test_a_pipe_or_a_ring_of_links_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "ring").symlink_to("ring")
    for name in ("pipe", "ring"):
        for folder in (False, True):
            with (
                pytest.raises(UsageError, match="not a regular file"),
                Aside(tmp_path / name, folder=folder) as aside,
            ):
                aside.commit(replace=True)
    assert sorted(os.listdir(tmp_path)) == ["pipe", "ring"]
    assert (tmp_path / "pipe").is_fifo()
