"""Who started this rank, and what it does when that is gone (with real launchers: tests/process/test_deepspeed_launcher.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from anabranch.learner import launchers
from anabranch.schemas.errors import ConfigError, DeadlineError, TemporaryError

PROGRAM = ["/v/bin/python", "/v/bin/deepspeed", "--hostfile", "hosts", "--module", "anabranch.cli.main"]
ON_NODE = [
    "/v/bin/python3.11",
    "-u",
    "-m",
    "deepspeed.launcher.launch",
    "--world_info=x",
    "--module",
    "anabranch.cli.main",
]


def processes(proc: Path, *commands: list[str]) -> None:
    """This process's parent has the first command, its parent the next, and so on."""
    pid = os.getppid()
    for number, words in enumerate(commands):
        folder, above = proc / str(pid), 900_000 + number
        folder.mkdir(parents=True)
        (folder / "cmdline").write_text("\0".join(words) + "\0")
        (folder / "stat").write_text(f"{pid} (a b) c) S {above} 1 1 0")
        pid = above


@pytest.mark.parametrize(
    ("commands", "count"),
    [
        ([ON_NODE, PROGRAM, ["-bash"]], 2),
        ([ON_NODE, ["sshd: somebody"]], 1),
        ([["/v/bin/python", "/v/bin/torchrun", "--nproc-per-node", "8"], ["bash"]], 1),
        ([["/v/bin/python", "-m", "torch.distributed.run"], ["bash"]], 1),
        ([["/v/bin/torchrun"], ["bash"]], 1),
        ([["bash", "-c", "RANK=0 deepspeed"]], 0),
        ([["/v/bin/python", "-I", "-m", "anabranch.cli.main", "learn", "--config", "deepspeed"]], 0),
        ([], 0),
    ],
)
def test_launchers_are_told_from_what_else_starts_a_rank(tmp_path: Path, commands: list[list[str]], count: int) -> None:
    processes(tmp_path, *commands)
    assert launchers.launchers(tmp_path) == [os.getppid(), 900_000][:count]


def test_a_launcher_that_is_gone_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = iter([[7, 5], [7, 5], [7]])
    monkeypatch.setattr(launchers, "launchers", lambda: next(chains))
    monkeypatch.setattr(launchers, "POLL_S", 0.01)
    gone = threading.Event()
    launchers.watch_launchers(gone.set)
    assert gone.wait(10)
    monkeypatch.setattr(launchers, "launchers", list)
    launchers.watch_launchers(lambda: pytest.fail("there is none"))


@pytest.mark.parametrize(
    "says",
    ["[/x/third_party/gloo/pair.cc:5] Timed out waiting 1000ms for recv", "Connection closed by peer [10.0.0.1]:5"],
)
def test_a_rank_that_lost_another_ends_as_one_that_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with pytest.raises(TemporaryError, match="rank 1 of 2: another rank is gone"), launchers.other_ranks(1, 2):
        raise RuntimeError(says)
    assert slept[0] > launchers.LAUNCHER_POLL_S, "the launcher has seen who went first"


@pytest.mark.parametrize(
    ("error", "world_size"),
    [
        (RuntimeError("shape mismatch"), 2),
        (DeadlineError("gloo: waited"), 2),
        (ConfigError("nccl is not installed"), 2),
        (NotImplementedError("gloo"), 2),
        (RuntimeError("gloo"), 1),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception, world_size: int) -> None:
    with pytest.raises(type(error)) as caught, launchers.other_ranks(0, world_size):
        raise error
    assert caught.value is error


def test_signals_of_one_request_ask_once_and_a_later_one_ends_the_process() -> None:
    code = (
        "import os, signal, time\n"
        "from anabranch.learner import launchers\n"
        "from anabranch.transport.runtime import StopSignal\n"
        "stop = StopSignal(); launchers.stop_by_launcher(stop)\n"
        "for number in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), number)\n"
        "assert stop.reason == 'SIGINT', stop.reason\n"
        "print('asked', flush=True)\n"
        "launchers.SAME_REQUEST_S = 0.0\n"
        "time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('still there')\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("asked\n", 128 + signal.SIGTERM), done.stderr
