"""One supervised child: a command in a session and process group of its own, as an explicit state machine.

Invariant: when a child's leader has ended, its whole process group has been killed before the leader's number is
given back (the zombie keeps it reserved until then), so nothing of a child outlives it and nothing else is hit.
Held by tests/process/test_supervisor.py.

    NEW -> RUNNING -> ENDED                         exit 0, and the policy does not restart that (from
              |                                   there to BACKOFF, where the run still needs it)
              |  \\--> FAILED                        exit 2 or 78, or the restart budget is used up
              |  \\--> BACKOFF -> RUNNING            any other exit
              \\-----> STOPPING -> STOPPED           asked to stop (also from BACKOFF, at once)
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import BinaryIO

from anabranch.deploy.cleanup import Cleanup
from anabranch.deploy.notify import NotifySocket
from anabranch.schemas.errors import EXIT_CONFIG, EXIT_USAGE
from anabranch.transport.runtime import die_with_parent

_NOT_CONFIGURATION = re.compile(r"^anabranch: (Gate|Checkpoint)Error: ", re.MULTILINE)
NEVER_RESTART = frozenset({EXIT_USAGE, EXIT_CONFIG})


class ChildState(StrEnum):
    NEW = "new"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    ENDED = "ended"
    FAILED = "failed"
    STOPPED = "stopped"


class Restart(StrEnum):
    ON_FAILURE = "on-failure"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`env` is added to the supervisor's common environment. `completes_run`: its exit 0 is the end of the run.
    `ends_itself`: given time to end by itself after that, and started again if it ends before. Lower `stop_order` is stopped first. Standard output goes
    to `stdout` where given, else to the log with standard error. A child that has sent sd_notify messages and then sends
    none for `watchdog_s` is killed and restarted."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    restart: Restart = Restart.ON_FAILURE
    completes_run: bool = False
    ends_itself: bool = False
    stop_order: int = 0
    stdout: Path | None = None
    watchdog_s: float | None = None
    stop_within_s: float | None = None  # from SIGTERM to SIGKILL, where that is less than the supervisor's own


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """More than `budget` restarts within `window_s` are too many; waits double from `backoff_s` to `backoff_cap_s`."""

    budget: int = 5
    window_s: float = 600.0
    backoff_s: float = 0.5
    backoff_cap_s: float = 15.0


class Child:
    """`poll` moves the state machine on; it never blocks."""

    def __init__(
        self, spec: ChildSpec, *, log: Path, environment: Mapping[str, str], cleanup: Cleanup, limits: RestartLimits
    ) -> None:
        self.spec = spec
        self.log = log
        self.state = ChildState.NEW
        self.restarts = 0
        self.exit_code: int | None = None  # of the latest exit; −N: killed by signal N
        self.reason = ""  # why it is FAILED
        self._notify = NotifySocket(f"anabranch-{cleanup.estate.token}-{spec.name}")
        self._environment = {
            **environment, **spec.env, **cleanup.environment, "NOTIFY_SOCKET": self._notify.address
        }  # fmt: skip
        self._cleanup = cleanup
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._hung_s = 0.0
        self._log_start = 0
        self._restart_times: deque[float] = deque()
        self._due = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def silent_s(self) -> float | None:
        """Since its last sd_notify message in this start, None before the first."""
        self._notify.receive()
        return self._notify.silent_s if self._process is not None else None

    @property
    def over(self) -> bool:
        """It will not run again."""
        return self.state in (ChildState.ENDED, ChildState.FAILED, ChildState.STOPPED)

    def start(self) -> None:
        """Must be called in the main thread: the kernel ties the death signal to the thread that forked."""
        self._notify.restarted()
        self._hung_s = 0.0
        with contextlib.ExitStack() as files:
            log = files.enter_context(self.log.open("ab"))
            self._log_start = log.tell()
            stdout: BinaryIO = log if self.spec.stdout is None else files.enter_context(self.spec.stdout.open("wb"))
            try:
                self._process = subprocess.Popen(
                    self.spec.argv,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            except OSError as error:
                self._fail(f"cannot be started: {error}")
                return
        self._cleanup.record_group(self._process.pid)
        self.state = ChildState.RUNNING

    def poll(self) -> None:
        """Notice an exit, or start again when the wait is over."""
        if self.state is ChildState.BACKOFF and time.monotonic() >= self._due:
            self.restarts += 1
            self.start()
        elif self._process is not None and (code := self._reap()) is not None:
            self.exit_code = code
            if self.state is ChildState.STOPPING:
                self.state = ChildState.STOPPED
            else:
                self._decide(code)
        elif self.state is ChildState.RUNNING:
            self._watch()

    def ended_too_soon(self) -> None:
        """It exited 0, but is still needed: start it again, within the budget."""
        assert self.state is ChildState.ENDED
        self._back_off()

    def terminate(self) -> None:
        """SIGTERM to the leader, which knows how to end its own children."""
        self._stop_with(lambda pid: os.kill(pid, signal.SIGTERM))

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        self._stop_with(lambda pid: os.killpg(pid, signal.SIGKILL))

    def _stop_with(self, send: Callable[[int], None]) -> None:
        if self._process is None:
            if not self.over:
                self.state = ChildState.STOPPED
            return
        self.state = ChildState.STOPPING
        with contextlib.suppress(ProcessLookupError):
            send(self._process.pid)

    def log_tail(self, lines: int = 15) -> list[str]:
        """The last non-empty log lines of the latest start."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - 32_768))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def _reap(self) -> int | None:
        process = self._process
        assert process is not None
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self._cleanup.forget_group(process.pid)
        self._process = None
        return process.wait()

    def _watch(self) -> None:
        self._notify.receive()
        silent_s = self._notify.silent_s
        if self.spec.watchdog_s is None or silent_s is None or silent_s <= self.spec.watchdog_s or self._hung_s:
            return
        self._hung_s = silent_s
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Release the notification socket; the child must be gone."""
        self._notify.close()

    @property
    def last_exit(self) -> str:
        """Words for the latest exit, "" before the first."""
        if self.exit_code is None:
            return ""
        if self._hung_s:
            return f"hung for {self._hung_s:.0f} s, killed"
        said = "\n".join(self.log_tail()) if self.exit_code == EXIT_CONFIG else ""
        return describe_exit(self.exit_code, said)

    def _decide(self, code: int) -> None:
        if code == 0 and self.spec.restart is not Restart.ALWAYS:
            self.state = ChildState.ENDED
        elif code in NEVER_RESTART:
            self._fail(f"{self.last_exit}; restarting would not help")
        elif self.spec.restart is Restart.NEVER:
            self._fail(self.last_exit)
        else:
            self._back_off()

    def _back_off(self) -> None:
        now = time.monotonic()
        while self._restart_times and now - self._restart_times[0] > self._limits.window_s:
            self._restart_times.popleft()
        recent = len(self._restart_times)
        if recent >= self._limits.budget:
            self._fail(f"{self.last_exit}, and {recent} restarts within {self._limits.window_s:.0f} s did not help")
            return
        self._restart_times.append(now)
        self._due = now + min(self._limits.backoff_cap_s, self._limits.backoff_s * 2**recent)
        self.state = ChildState.BACKOFF

    def _fail(self, reason: str) -> None:
        self.state = ChildState.FAILED
        self.reason = reason


def describe_exit(code: int, said: str = "") -> str:
    """`exit 78 (configuration)`, `killed by SIGKILL`. `said`: the last lines of its log; what else than the configuration ends with 78
    is told by the error there."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    meanings = {2: "usage", 70: "internal error", 75: "temporary", 76: "protocol", 78: "configuration"}
    if code == EXIT_CONFIG and (named := _NOT_CONFIGURATION.findall(said)):
        meanings[code] = named[-1].lower()
    return f"exit {code}" + (f" ({meanings[code]})" if code in meanings else "")
