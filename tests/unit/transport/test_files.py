"""A reader sees the old content or the new, never half of one."""

from __future__ import annotations

import itertools
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from anabranch.transport.files import write_atomically
from tests.limits import file_size_limit


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    return path


def others(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if p != path)


def test_content_is_replaced_and_nothing_else_is_left(target: Path) -> None:
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert others(target) == []
    fresh = target.with_name("fresh file")
    write_atomically(fresh, b"")
    assert fresh.read_bytes() == b""


def test_a_full_disk_leaves_the_old_content_and_no_leftover(target: Path) -> None:
    with file_size_limit(100), pytest.raises(OSError, match="too large"):
        write_atomically(target, bytes(1000))
    assert target.read_bytes() == b"old"
    assert others(target) == []


def test_a_folder_in_the_way_leaves_no_leftover(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "taken", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "nowhere" / "file", b"new")


def test_the_mode_is_as_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_atomically(path, b"x", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_replaced_by_the_file_and_its_target_stays(target: Path) -> None:
    link = target.with_name("link")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert not link.is_symlink()
    assert (link.read_bytes(), target.read_bytes()) == (b"new", b"old")


def test_a_reader_never_sees_half(target: Path) -> None:
    contents = [bytes([n]) * (200_000 + n) for n in range(2)]
    write_atomically(target, contents[0])
    stop = threading.Event()

    def rewrite() -> None:
        for number in itertools.count():
            write_atomically(target, contents[number % 2])
            if stop.is_set():
                return

    thread = threading.Thread(target=rewrite)
    thread.start()
    seen = []
    try:
        end = time.monotonic() + 20
        while len(seen) < 200 or len(set(seen)) < 2:
            assert time.monotonic() < end, "it was not rewritten while it was read"
            content = target.read_bytes()
            assert content in contents
            seen.append(len(content))
    finally:
        stop.set()
        thread.join()
    assert os.listdir(target.parent) == [target.name]
