"""Starting the learner's ranks on this machine.

Invariant: no rank outlives the process that launched it, and none is left waiting for one that died. Held by
tests/e2e/test_learner_engine.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from anabranch.learner.distribute import RENDEZVOUS_FILE
from anabranch.transport.runtime import bound_to_parent


def launch_ranks(world_size: int, argv: Sequence[str] | None = None, *, grace_s: float = 30.0) -> int:
    """Run `argv` (default: the command line of this process) once per rank, and wait for all.

    The ranks meet through a file that has no name and talk over loopback; they die with this process. SIGTERM and
    SIGINT are passed on to rank 0, which ends the others (under systemd use KillMode=mixed, or rank 0 gets the signal
    twice). If a rank fails, or rank 0 has ended, the others get `grace_s` seconds and are killed.

    Returns:
        0 if no rank failed (one that outlives rank 0 by `grace_s` has nothing left to do), else the exit code of the first that did not (128 + signal if it was killed).
    """
    command = list(argv) if argv is not None else [sys.executable, *sys.orig_argv[1:]]
    # A file without a name in any file system: whatever ends this process, nothing of it is left.
    store = os.memfd_create("anabranch-ranks")
    shared = {
        "WORLD_SIZE": str(world_size),
        RENDEZVOUS_FILE: f"/proc/{os.getpid()}/fd/{store}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            # Own sessions: Ctrl-C in a terminal goes to a whole process group, and would reach rank 0 twice.
            ranks.append(
                subprocess.Popen(
                    bound_to_parent(command),
                    env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,
                )
            )
        with _passing_signals_to(ranks[0]):
            return _wait_for(ranks, grace_s)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        os.close(store)


def _wait_for(ranks: list[subprocess.Popen[bytes]], grace_s: float) -> int:
    failed, deadline = 0, math.inf
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if not failed:
            failed = next((code for code in codes if code), 0)
        if deadline == math.inf and (failed or codes[0] is not None):
            deadline = time.monotonic() + grace_s
        if None not in codes:
            break
        time.sleep(0.05)
    return failed if failed >= 0 else 128 - failed


@contextlib.contextmanager
def _passing_signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Only the main thread can handle signals; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
