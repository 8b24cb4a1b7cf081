"""The supervisor's end of the janitor's pipe, and temporary folders that nobody may leave behind.

Invariant: while the context is open a janitor is running that knows every recorded group and folder, or one is
started again at the next `check`; no child inherits the pipe (Python's descriptors close on exec, and the janitor is
given the read end only). `close` removes the folders itself, says goodbye and waits for the janitor to end.
Held by tests/process/test_supervisor.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from anabranch.deploy import janitor


class Cleanup:
    """Starts the janitor. `hold_fds` stay open in it (a locked file stays locked until the cleaning is done)."""

    def __init__(self, *, hold_fds: Sequence[int] = ()) -> None:
        self.estate = janitor.Estate(token=secrets.token_hex(16))
        self._hold_fds = tuple(hold_fds)
        self._start()

    @property
    def environment(self) -> dict[str, str]:
        """What every child carries, so that it is known as the run's own wherever it moved."""
        return {janitor.TOKEN_VARIABLE: self.estate.token}

    @property
    def janitor_pid(self) -> int:
        return self._process.pid

    def record_group(self, leader_pid: int) -> None:
        line = janitor.process_line(leader_pid)
        if line is not None:
            self._tell({"group": leader_pid, "start": line.start})

    def forget_group(self, leader_pid: int) -> None:
        """Call it before the leader is reaped: from then on its number may be given to others."""
        self._tell({"gone": leader_pid})

    def folder(self, prefix: str) -> Path:
        """A new temporary folder that disappears with the run."""
        path = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
        self._tell({"folder": str(path), "id": janitor.folder_id(path)})
        return path

    def check(self) -> None:
        """Start the janitor again if somebody killed it."""
        if self._process.poll() is not None:
            self._pipe_close()
            self._start()

    def close(self, *, deadline_s: float = 10.0) -> list[int]:
        """Kill what is left, remove the folders, dismiss the janitor. Returns pids that would not die."""
        left = janitor.sweep(self.estate, deadline_s=deadline_s)
        for path, identity in self.estate.folders.items():
            if janitor.folder_id(path) == identity:
                shutil.rmtree(path, ignore_errors=True)
        self._tell({"bye": True})
        self._pipe_close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return left

    def _start(self) -> None:
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", janitor.__file__],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=self._hold_fds,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self._write_end = write_end
        self._send({"token": self.estate.token})
        for group, start in self.estate.groups.items():
            self._send({"group": group, "start": start})
        for path, identity in self.estate.folders.items():
            self._send({"folder": path, "id": identity})

    def _tell(self, message: dict[str, object]) -> None:
        line = json.dumps(message)
        self.estate.hear(line)
        self._send(message)

    def _send(self, message: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the next check starts a new janitor and tells it everything
            os.write(self._write_end, json.dumps(message).encode() + b"\n")  # below PIPE_BUF: whole or not at all

    def _pipe_close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._write_end)
