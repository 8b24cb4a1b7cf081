"""What a process owes whoever supervises it: stopping when asked, saying that it lives, dying with its parent, and an
exit code that tells "try again" from "a person must change something".

Invariant: the first SIGTERM or SIGINT only sets a flag, the second ends the process at once; a process that dies of
an AnabranchError leaves one line on stderr and that error's exit code. Held by tests/unit/transport/test_runtime.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from anabranch.schemas.errors import EXIT_INTERNAL, EXIT_OK, EXIT_TEMPORARY, AnabranchError
from anabranch.transport.log import LEVEL_VARIABLE
from anabranch.transport.redact import redact_text

_PR_SET_PDEATHSIG = 1
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class StopSignal:
    """Set by SIGTERM or SIGINT once `install` was called (main thread only), or by `set`.

    Waiting goes through a pipe and not a threading.Event: a handler that interrupts `Event.wait` at the wrong moment
    would deadlock on the event's own lock.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)

    def install(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set():
            os._exit(128 + number)
        self.set(signal.Signals(number).name)

    def set(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            os.write(self._write_fd, b"x")

    def is_set(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str:
        """Why: "SIGTERM", "SIGINT", or what was given to `set`; "" while not set."""
        return self._reason or ""

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to `timeout_s` seconds, less if the signal comes; returns whether it is set."""
        if not self.is_set():
            select.select([self._read_fd], [], [], max(0.0, timeout_s))
        return self.is_set()


def sd_notify(*assignments: str) -> bool:
    """Send "READY=1", "STATUS=...", "WATCHDOG=1", "STOPPING=1" to systemd; False where no one listens
    (sd_notify(3): datagram to $NOTIFY_SOCKET, a leading "@" means the abstract namespace)."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    name = "\0" + path[1:] if path[0] == "@" else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto("\n".join(a.replace("\n", " ") for a in assignments).encode(), name)
        except OSError:
            return False  # a supervisor that has gone away must not take the service with it
    return True


def watchdog_interval_s() -> float | None:
    """How often to send WATCHDOG=1: half of what systemd allows; None where it does not watch this process."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel SIGKILL this process when its parent ends, however that ends (Linux; elsewhere nothing).

    Args:
        parent_pid: who the parent was when it started us; if it is gone already, we exit now. Default: trust that the
            present parent is the one.

    The kernel counts the *thread* that started the process as its parent: start such children from a thread that
    lives as long as they should.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(EXIT_INTERNAL)


def bound_to_parent(argv: list[str]) -> list[str]:
    """Command that runs `argv` so that it dies with this process, for any program.

    A small interpreter sets the parent-death signal and becomes the program (the setting survives exec). This is safe
    where threads run, which `preexec_fn` is not.
    """
    code = (
        "import ctypes,os,sys\n"
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)\n"
        f"os.getppid() == {os.getpid()} or os._exit({EXIT_INTERNAL})\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    return [sys.executable, "-I", "-S", "-c", code, *argv] if sys.platform.startswith("linux") else argv


def disk_full(error: BaseException) -> str | None:
    """The line for a user whose disk is full; None if `error` says something else."""
    if not isinstance(error, OSError) or error.errno not in _DISK_FULL:
        return None
    where = f" ({error.filename})" if error.filename else ""
    return f"the disk is full{where}: free some and start again"


def run_service(main: Callable[[], int | None], *, debug: bool | None = None) -> int:
    """Run `main` and return the exit code the process should end with.

    An AnabranchError becomes one line on stderr and its own code (its traceback shows only with `debug`, by default
    when the log level is "debug"); a full disk one line and 75; Ctrl-C 130; any other exception 70 with its traceback.
    """
    try:
        return main() or EXIT_OK
    except AnabranchError as error:
        if debug or (debug is None and os.environ.get(LEVEL_VARIABLE, "").lower() == "debug"):
            print(redact_text(traceback.format_exc()), file=sys.stderr, end="")
        line = redact_text("; ".join(part.strip() for part in str(error).splitlines() if part.strip()))
        print(f"anabranch: {type(error).__name__}: {line}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("anabranch: interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001 - the edge of the process: report everything, with its traceback
        if (full := disk_full(error)) is not None:
            print(f"anabranch: {full}", file=sys.stderr, flush=True)
            return EXIT_TEMPORARY
        print(redact_text(traceback.format_exc()), file=sys.stderr, end="", flush=True)
        return EXIT_INTERNAL
