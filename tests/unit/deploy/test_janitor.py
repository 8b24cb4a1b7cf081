"""The janitor touches only what is provably its supervisor's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.deploy import janitor

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own that no supervisor owns."""
    process = subprocess.Popen(SLEEP, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def start_of(pid: int) -> int:
    line = janitor.process_line(pid)
    assert line is not None
    return line.start


def told(*messages: object) -> int:
    """Run the janitor over these messages and a closed pipe; returns its exit code."""
    text = "".join(json.dumps(message) + "\n" for message in messages)
    done = subprocess.run([sys.executable, "-I", "-S", janitor.__file__], input=text, text=True, timeout=30)
    return done.returncode


def test_a_recorded_group_is_killed(stranger: subprocess.Popen[bytes]) -> None:
    assert told({"group": stranger.pid, "start": start_of(stranger.pid)}) == 0
    assert stranger.wait(timeout=5) == -signal.SIGKILL


def test_after_a_goodbye_nothing_is_touched(stranger: subprocess.Popen[bytes], tmp_path: Path) -> None:
    group = {"group": stranger.pid, "start": start_of(stranger.pid)}
    assert told(group, {"folder": str(tmp_path), "id": janitor.folder_id(tmp_path)}, {"bye": True}) == 0
    assert stranger.poll() is None
    assert tmp_path.is_dir()


def test_a_reused_pid_is_not_hit(stranger: subprocess.Popen[bytes]) -> None:
    assert told({"group": stranger.pid, "start": start_of(stranger.pid) - 1}) == 0
    assert stranger.poll() is None


def test_a_group_that_was_given_back_is_not_hit(stranger: subprocess.Popen[bytes]) -> None:
    assert told({"group": stranger.pid, "start": start_of(stranger.pid)}, {"gone": stranger.pid}) == 0
    assert stranger.poll() is None


def test_a_member_whose_leader_is_gone_is_hit_only_if_it_was_there_before_the_death() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"import subprocess; print(subprocess.Popen({SLEEP!r}).pid)"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert leader.stdout is not None
    member = int(leader.stdout.readline())
    leader.stdout.close()
    leader.wait()
    estate = janitor.Estate(groups={leader.pid: 1})
    try:
        assert janitor.owned(estate, start_of(member) - 1) == []
        assert [line.pid for line in janitor.owned(estate, start_of(member))] == [member]
        assert janitor.sweep(estate) == []
    finally:
        if janitor.process_line(member):
            os.kill(member, signal.SIGKILL)
    assert janitor.owned(estate, janitor.ticks_now()) == []


def test_the_token_marks_a_process_anywhere(stranger: subprocess.Popen[bytes]) -> None:
    marked = subprocess.Popen(SLEEP, start_new_session=True, env={janitor.TOKEN_VARIABLE: "t0ken"})
    assert told({"token": "t0ken"}) == 0
    assert marked.wait(timeout=5) == -signal.SIGKILL
    assert stranger.poll() is None


def test_only_the_recorded_folder_itself_is_removed(tmp_path: Path) -> None:
    mine, replaced, other = tmp_path / "mine", tmp_path / "replaced", tmp_path / "other"
    for folder in (mine, replaced, other):
        folder.mkdir()
        (folder / "file").write_text("x")
    identity = janitor.folder_id(replaced)
    replaced.rename(tmp_path / "moved")
    replaced.symlink_to(other)
    messages = [{"folder": str(mine), "id": janitor.folder_id(mine)}, {"folder": str(replaced), "id": identity}]
    assert told(*messages) == 0
    assert not mine.exists()
    assert (other / "file").exists()
    assert (tmp_path / "moved" / "file").exists()


def test_a_torn_message_is_ignored(stranger: subprocess.Popen[bytes]) -> None:
    text = f'{{"group": {stranger.pid}, "sta'
    done = subprocess.run([sys.executable, "-I", "-S", janitor.__file__], input=text, text=True, timeout=30)
    assert done.returncode == 0
    assert stranger.poll() is None
