"""Cleans up after a supervisor that died without a goodbye; a program of its own, standard library only.

Invariant: nothing is killed or removed unless it is provably the supervisor's. A process counts as its own when it
carries the run's token in its environment, or belongs to a recorded group whose leader still has the recorded
start time, or, if the leader is gone, was in that group before the supervisor died (until then the group's number
cannot have been given to anybody else, because only the supervisor reaps the leader, and it says so first). A folder
counts when device and inode are the recorded ones. Held by tests/unit/deploy/test_janitor.py and
tests/process/test_supervisor.py.

It runs in a session of its own and reads JSON lines from standard input, the read end of a pipe whose only writer
is the supervisor: {"token": T}, {"group": PID, "start": TICKS}, {"gone": PID}, {"folder": PATH, "id": [DEV, INO]},
{"bye": true}. At the end of the input without a goodbye it cleans up.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

TOKEN_VARIABLE = "ANABRANCH_SUPERVISED_BY"  # noqa: S105 (a name, not a secret: it marks processes)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessLine(NamedTuple):
    """What `/proc/PID/stat` says: parent, process group, start in clock ticks since boot, state letter."""

    pid: int
    state: str
    group: int
    start: int


@dataclass
class Estate:
    """What a supervisor owns. `groups` maps a process group (= pid of its leader) to the leader's start time."""

    token: str = ""
    groups: dict[int, int] = field(default_factory=dict)
    folders: dict[str, tuple[int, int]] = field(default_factory=dict)
    said_goodbye: bool = False

    def hear(self, line: str) -> None:
        """Take in one message; a torn or unknown one is ignored."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        match message:
            case {"token": str(token)}:
                self.token = token
            case {"group": int(group), "start": int(start)}:
                self.groups[group] = start
            case {"gone": int(group)}:
                self.groups.pop(group, None)
            case {"folder": str(path), "id": [int(device), int(inode)]}:
                self.folders[path] = (device, inode)
            case {"bye": True}:
                self.said_goodbye = True


def process_line(pid: int) -> ProcessLine | None:
    """`/proc/PID/stat`, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except (OSError, ValueError):
        return None
    words = text[text.rindex(")") + 2 :].split()
    return ProcessLine(pid, words[0], int(words[2]), int(words[19]))


def ticks_now() -> int:
    """Clock ticks since boot, rounded up: the unit of `ProcessLine.start`."""
    return int(float(Path("/proc/uptime").read_text("ascii").split()[0]) * _TICKS_PER_S) + 1


def folder_id(path: str | Path) -> tuple[int, int] | None:
    """(device, inode) of a real folder, None for anything else."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if os.path.isdir(path) and not os.path.islink(path) else None


def owned(estate: Estate, died_at_ticks: int) -> list[ProcessLine]:
    """Living processes of the estate; zombies are left to their parents."""
    lines = [line for name in os.listdir("/proc") if name.isdigit() and (line := process_line(int(name)))]
    leaders = {line.pid: line for line in lines if line.pid in estate.groups}
    return [
        line
        for line in lines
        if line.state not in "ZX"
        and line.pid != os.getpid()
        and (_in_group(line, leaders.get(line.group), estate, died_at_ticks) or _has_token(line.pid, estate.token))
    ]


def sweep(estate: Estate, *, died_at_ticks: int | None = None, deadline_s: float = 10.0) -> list[int]:
    """SIGKILL every process of the estate until none is left or the deadline passes; returns pids that remain."""
    died = ticks_now() if died_at_ticks is None else died_at_ticks
    give_up = time.monotonic() + deadline_s
    while victims := owned(estate, died):
        if time.monotonic() > give_up:
            return [line.pid for line in victims]
        for line in victims:
            _kill(line)
        time.sleep(0.02)
    return []


def remove_folders(folders: Iterable[tuple[str, tuple[int, int]]]) -> None:
    for path, identity in folders:
        if folder_id(path) == identity:
            shutil.rmtree(path, ignore_errors=True)


def _in_group(line: ProcessLine, leader: ProcessLine | None, estate: Estate, died_at_ticks: int) -> bool:
    if line.group not in estate.groups:
        return False
    if leader is not None:
        return leader.start == estate.groups[line.group]
    return line.start <= died_at_ticks


def _has_token(pid: int, token: str) -> bool:
    if not token:
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{TOKEN_VARIABLE}={token}".encode() in environment.split(b"\0")


def _kill(line: ProcessLine) -> None:
    """Through a pidfd opened before the identity is looked at again, so that a reused pid is never hit."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(line.pid)
        try:
            again = process_line(line.pid)
            if again is not None and again.start == line.start:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the pipe, whatever else is being told to end
    estate = Estate()
    for line in sys.stdin:
        estate.hear(line)
    if estate.said_goodbye:
        return 0
    left = sweep(estate)
    remove_folders(estate.folders.items())
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
