"""How producers of a node find one memory: the living count, the dead and the strange do not."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.producers.mirror_registry import NotShared, check_folder, find_or_make

NAME = "run.0123"


class Memory:
    def __init__(self, content: str) -> None:
        self.content = content
        self.descriptors = os.memfd_create("anabranch-test"), 9

    @classmethod
    def adopt(cls, control: str, image: str) -> Memory | None:
        found = os.readlink(control)
        return cls("adopted") if found.startswith("/memfd:anabranch-test") else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "node"


def find(folder: Path) -> tuple[Memory, bool]:
    return find_or_make(folder, NAME, Memory.adopt, lambda: Memory("made"))


def holders(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (folder / f"{NAME}.holders").read_text().splitlines()]


def test_the_first_makes_it_and_the_second_finds_it(folder: Path) -> None:
    first, was_there = find(folder)
    assert (first.content, was_there) == ("made", False)
    second, was_there = find(folder)
    assert (second.content, was_there) == ("adopted", True)
    assert {(h["pid"], h["control"]) for h in holders(folder)} == {
        (os.getpid(), first.descriptors[0]),
        (os.getpid(), second.descriptors[0]),
    }


def test_holders_that_are_gone_or_hold_something_else_are_swept(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    gone = subprocess.Popen([sys.executable, "-I", "-c", ""])
    gone.wait()
    lines = [
        json.dumps({"pid": gone.pid, "control": 3, "image": 4}),
        json.dumps({"pid": os.getpid(), "control": 0, "image": 1}),  # not memory of ours
        json.dumps({"pid": os.getpid(), "control": 999, "image": 998}),
        '{"pid": "x"}',
        "half a li",
    ]
    (folder / f"{NAME}.holders").write_text("\n".join(lines))
    made, was_there = find(folder)
    assert not was_there
    assert holders(folder) == [{"pid": os.getpid(), "control": made.descriptors[0], "image": 9}]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_living_holder_that_cannot_be_opened_means_no_sharing(folder: Path, number: int) -> None:
    """Nor a second memory that others would find: it may well hold the one that there is."""
    find(folder)

    def closed(control: str, image: str) -> Memory | None:
        raise OSError(number, os.strerror(number), control)

    with pytest.raises(NotShared, match="hidepid"):
        find_or_make(folder, NAME, closed, lambda: Memory("made"))
    assert len(holders(folder)) == 1, "it stays listed: others may be able to open it"


def test_a_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(NotShared, match="mode 0700"):
        check_folder(folder)


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotShared, match="mode 0700"):
        check_folder(folder)


def test_another_users_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(NotShared, match="folder of this user"):
        check_folder(folder)


def test_a_holder_that_has_ended_but_was_not_waited_for_counts_as_gone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    zombie = subprocess.Popen([sys.executable, "-I", "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    zombie.stdout.read()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    (folder / f"{NAME}.holders").write_text(json.dumps({"pid": zombie.pid, "control": 0, "image": 1}))
    assert find(folder)[0].content == "made"
    zombie.wait()
    zombie.stdout.close()
