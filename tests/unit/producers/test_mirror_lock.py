"""Locks between processes: bounded waits, names of holders, nothing left behind by the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.producers.mirror_lock import FileLock
from anabranch.schemas.errors import DeadlineError

HOLDER = (
    "import fcntl, sys, os, time; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT);"
    "fcntl.flock(fd, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock exclusively."""
    process = subprocess.Popen([sys.executable, "-I", "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_readers_share_and_a_writer_is_alone(path: Path) -> None:
    one, two = FileLock(path, "it"), FileLock(path, "it")
    assert one.try_lock(shared=True)
    assert two.try_lock(shared=True)
    assert not two.try_lock()
    one.unlock()
    assert two.try_lock()
    assert not one.try_lock(shared=True)
    two.close()
    assert one.try_lock(shared=True), "closing unlocks"
    one.close()


def test_giving_up_names_what_and_whose_it_is(path: Path, holder: subprocess.Popen[str]) -> None:
    lock = FileLock(path, "the node's weights")
    with pytest.raises(DeadlineError, match=rf"the node's weights, held by process {holder.pid}\b"):
        lock.lock(deadline_s=0.05)
    lock.close()


def test_a_stopped_holder_blocks_for_the_deadline_and_a_dead_one_not_at_all(
    path: Path, holder: subprocess.Popen[str]
) -> None:
    lock = FileLock(path, "it")
    os.kill(holder.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=str(holder.pid)):
        lock.lock(deadline_s=0.05)
    os.kill(holder.pid, signal.SIGKILL)
    with lock.held(deadline_s=10):
        pass
    assert FileLock(path, "it").try_lock(), "held lets go at the end"
    lock.close()


def test_a_forked_child_keeps_no_lock_of_its_dead_parent(path: Path) -> None:
    """A worker that an engine forks outlives a kill -9 of its parent for a while."""
    lock = FileLock(path, "it")
    assert lock.try_lock()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(1)
    try:
        assert not FileLock(path, "it").try_lock(), "the child unlocks nothing"
        lock.close()  # as the death of this process would
        FileLock(path, "it").lock(deadline_s=10)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
