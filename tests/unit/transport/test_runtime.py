from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from anabranch.schemas.errors import EXIT_INTERNAL, EXIT_TEMPORARY, ConfigError, DeadlineError
from anabranch.transport.runtime import (
    StopSignal,
    bound_to_parent,
    run_service,
    sd_notify,
    watchdog_interval_s,
)


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", textwrap.dedent(code)]


def until(condition, what: str, deadline_s: float = 10.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has: in a container nobody may reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_stop_signal_ends_a_wait_early():
    stop = StopSignal()
    assert not stop.wait(0.01)
    assert (stop.is_set(), stop.reason) == (False, "")
    stop.set("asked")
    stop.set("again")
    start = time.monotonic()
    assert stop.wait(30)
    assert stop.wait(30)
    assert time.monotonic() - start < 20
    assert stop.reason == "asked"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends_at_once(number):
    program = python("""
        from anabranch.transport.runtime import StopSignal
        stop = StopSignal().install()
        print("ready", flush=True)
        stop.wait(60)
        print(stop.reason, flush=True)
        while True: stop.wait(0.1)
    """)
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        assert child.stdout.readline() == f"{number.name}\n"
        child.send_signal(number)
        assert child.wait(10) == 128 + number


def test_notifications_reach_systemd(tmp_path, monkeypatch):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert sd_notify("READY=1", "STATUS=step 3\nof 5")
        assert server.recv(100) == b"READY=1\nSTATUS=step 3 of 5"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        name = f"anabranch-test-{os.getpid()}"
        server.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert sd_notify("WATCHDOG=1")
        assert server.recv(100) == b"WATCHDOG=1"
    assert not sd_notify("WATCHDOG=1"), "nobody listens any more"
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not sd_notify("READY=1")


def test_the_watchdog_interval_is_half_of_what_is_allowed(monkeypatch):
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert watchdog_interval_s() is None
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    assert watchdog_interval_s() == 15.0
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_interval_s() == 15.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_interval_s() is None


@pytest.mark.parametrize("how", ["die_with_parent", "bound_to_parent"])
def test_a_child_dies_with_a_parent_that_is_killed(how):
    sleeper = "import time; print('up', flush=True); time.sleep(300)"
    if how == "bound_to_parent":
        start = f"argv = bound_to_parent([sys.executable, '-c', {sleeper!r}])"
    else:
        bound = (
            f"import os; from anabranch.transport.runtime import die_with_parent; die_with_parent(PARENT); {sleeper}"
        )
        start = f"argv = [sys.executable, '-I', '-c', {bound!r}.replace('PARENT', str(os.getpid()))]"
    program = python(f"""
        import os, subprocess, sys, time
        from anabranch.transport.runtime import bound_to_parent
        {start}
        child = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"up\\n"
        print(child.pid, flush=True)
        time.sleep(300)
    """)
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert not gone(child)
        parent.kill()
        parent.wait(10)
        until(lambda: gone(child), "the child's end")


def test_a_child_whose_parent_was_gone_before_it_started_does_not_stay():
    argv = bound_to_parent([sys.executable, "-c", "print('ran')"])
    # Run by an intermediate process: its parent is not the one that bound it.
    result = subprocess.run(
        python(f"import subprocess, sys; sys.exit(subprocess.run({argv!r}, timeout=20).returncode)"),
        capture_output=True,
        timeout=30,
    )
    assert result.returncode == 70
    assert result.stdout == b""


def test_a_known_error_is_one_line_and_its_own_code(capsys):
    def broken() -> None:
        raise ConfigError("unknown key a.b\nhub redis://u:pw@h/0 is wrong\n")

    assert run_service(broken, debug=False) == 78
    assert capsys.readouterr().err == "anabranch: ConfigError: unknown key a.b; hub redis://u:***@h/0 is wrong\n"


def test_debugging_shows_the_traceback_too(capsys, monkeypatch):
    def broken() -> None:
        raise DeadlineError.waiting_for("a batch", 3.0)

    monkeypatch.setenv("ANABRANCH_LOG_LEVEL", "debug")
    assert run_service(broken) == 75
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("anabranch: DeadlineError: gave up after 3.0 s waiting for a batch\n")


def test_a_bug_shows_its_traceback_and_ends_with_70(capsys):
    def broken() -> None:
        raise ZeroDivisionError("redis://u:pw@h/0")

    assert run_service(broken) == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ZeroDivisionError: redis://u:***@h/0" in shown


def test_success_interruption_and_own_exit_codes_pass(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    def leave() -> None:
        sys.exit(3)

    assert run_service(lambda: None) == 0
    assert run_service(lambda: 75) == 75
    assert run_service(interrupted) == 130
    with pytest.raises(SystemExit):
        run_service(leave)


def test_a_full_disk_is_one_line_and_a_temporary_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/metrics.jsonl")

    assert run_service(main) == EXIT_TEMPORARY
    assert capsys.readouterr().err == "anabranch: the disk is full (/data/metrics.jsonl): free some and start again\n"


def test_another_os_error_is_a_bug_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    assert run_service(main) == EXIT_INTERNAL
    assert "Traceback" in capsys.readouterr().err
