"""A rank among others that another launcher started: it does not outlive the launcher, and hides nobody's exit code.

Invariant: when the deepspeed or torchrun program that started this rank is gone, however it went, rank 0 stops as if it had been
told to, and a rank above 0 that hears nothing from it within a grace ends with 75. A rank that ends because another one is gone
ends later than that one does, so the launcher passes on the exit code of the one that knew why. One Ctrl-C is one request to
stop, however many signals a rank gets of it. Held by tests/process/test_deepspeed_launcher.py and
tests/unit/learner/test_launchers.py.

What deepspeed 0.19.8 does alone: its program leaves everything running when it gets SIGTERM, or when it is killed; the launcher
under it takes the code of whichever rank it first finds ended otherwise than by 0, looking once a second. It answers Ctrl-C, which
a terminal sends to the ranks as well, by sending them SIGTERM, and kills what is still there after 30 s.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from anabranch.schemas.errors import AnabranchError, TemporaryError
from anabranch.transport.runtime import StopSignal

POLL_S = 0.5
SAME_REQUEST_S = 5.0  # signals that come closer together are one request
LAUNCHER_POLL_S = 1.0  # of deepspeed.launcher.launch
_LAUNCHER = re.compile(r"deepspeed|torchrun|torch\.distributed\.(run|launch)|deepspeed\.launcher\.(launch|runner)")
# What gloo and NCCL say, as plain RuntimeErrors too, when another rank is not there any more or does not come.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused) by peer", re.IGNORECASE)


def launchers(proc: Path = Path("/proc")) -> list[int]:
    """Process ids of the launchers above this process, from the nearest on: of deepspeed two, its program and what that
    starts on each node. Empty where nobody of that kind started this process, or the system has no /proc."""
    found, pid = [], os.getppid()
    while _launches(proc / str(pid)):
        found.append(pid)
        pid = _parent(proc / str(pid))
    return found


def watch_launchers(on_gone: Callable[[], object]) -> None:
    """Call `on_gone` once, in a thread of its own, when one of the present `launchers` has ended."""
    chain = launchers()
    if chain:
        threading.Thread(target=_watch, args=(chain, on_gone), name="launcher watch", daemon=True).start()


def stop_by_launcher(stop: StopSignal) -> None:
    """`stop.install()` for a rank that a launcher started: the launcher's signal and the terminal's, or the service manager's,
    for the same request do not end the process at once, as a second one does. Main thread only."""
    first_s: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        first_s.append(time.monotonic())
        if first_s[-1] - first_s[0] > SAME_REQUEST_S:
            os._exit(128 + number)
        stop.set(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


@contextlib.contextmanager
def other_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Around what this rank does with the others.

    Raises:
        TemporaryError: another rank is gone, or did not come in time.
    """
    try:
        yield
    except AnabranchError:
        raise
    except RuntimeError as error:
        if world_size == 1 or not _says_lost(error):
            raise
        time.sleep(2 * LAUNCHER_POLL_S)  # whoever was first to go has an exit code that says more than ours
        first_line = str(error).strip().partition("\n")[0][:300]
        raise TemporaryError(
            f"rank {rank} of {world_size}: another rank is gone, or did not come in time; its own log says why ({first_line})"
        ) from error


def _says_lost(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_LOST.search(str(error))))


def _watch(chain: list[int], on_gone: Callable[[], object]) -> None:
    while launchers()[: len(chain)] == chain:
        time.sleep(POLL_S)
    on_gone()


def _launches(process: Path) -> bool:
    """Whether the program of a process, or the module that Python runs in it, is a launcher."""
    try:
        words = (process / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    program = [Path(word).name for word in words[:1]]
    if program and program[0].startswith("python"):
        # The first word that is no switch: a script, or the module after -m.
        program = [Path(word).name for word in words[1:] if word and not word.startswith("-")][:1]
    return any(_LAUNCHER.fullmatch(word) for word in program)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
