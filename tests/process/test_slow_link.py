"""The slow link that other tests and a benchmark lean on: it is slow, it counts, it can be cut, and nothing of it stays."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch.deploy.slow_link import ADDRESS, SlowLink
from anabranch.schemas.errors import AnabranchError, ConfigError
from tests.links import slow_link

pytestmark = pytest.mark.process
PORT, PAYLOAD = 7000, bytes(200_000)


def namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split())


def connected(link: SlowLink) -> tuple[socket.socket, socket.socket]:
    """A connection over the link: its ends on side a and on side b."""
    with link.inside("a"), socket.create_server((ADDRESS["a"], PORT)) as server:
        with link.inside("b"):
            near = socket.create_connection((ADDRESS["a"], PORT), timeout=10)
        far, _ = server.accept()
    near.settimeout(10)
    return far, near


def receive(end: socket.socket, count: int) -> int:
    got = 0
    while got < count and (part := end.recv(count - got)):
        got += len(part)
    return got


def test_it_is_slow_counts_bytes_can_be_cut_and_leaves_nothing() -> None:
    with slow_link(rtt_ms=40, rate_mbit=80) as link:
        assert set(link.namespaces.values()) <= namespaces()
        started = time.monotonic()
        far, near = connected(link)
        assert time.monotonic() - started >= 0.04
        with far, near:
            before, started = link.received_bytes("b"), time.monotonic()
            far.sendall(PAYLOAD)
            assert receive(near, len(PAYLOAD)) == len(PAYLOAD)
            assert time.monotonic() - started >= 0.02 + len(PAYLOAD) * 8 / 80e6
            assert 1.0 <= (link.received_bytes("b") - before) / len(PAYLOAD) <= 1.1

            link.cut()
            far.sendall(b"late")
            near.settimeout(0.3)
            with pytest.raises(TimeoutError):
                near.recv(4)
            link.mend()
            near.settimeout(10)
            assert receive(near, 4) == 4

        child = link.run("b", [sys.executable, "-I", "-c", "import time; time.sleep(60)"])
        assert child.poll() is None
    assert child.poll() is not None
    assert not set(link.namespaces.values()) & namespaces()


def test_an_error_inside_leaves_nothing_either() -> None:
    link = slow_link()

    def fail_inside() -> None:
        with link:
            link.cut()  # a link that is stopped must end too
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not set(link.namespaces.values()) & namespaces()


def test_namespaces_of_a_process_that_was_killed_go_with_the_next_link() -> None:
    slow_link()  # skips where there are no namespaces
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, foreign = f"ab{gone.pid}.0a", f"ab{os.getpid()}.x"
    try:
        for name in (left, foreign):
            subprocess.run(["ip", "netns", "add", name], check=True)
        with slow_link():
            assert left not in namespaces()
            assert foreign in namespaces()
    finally:
        for name in {left, foreign} & namespaces():
            subprocess.run(["ip", "netns", "del", name], check=True)


def test_two_links_do_not_meet() -> None:
    with slow_link(rtt_ms=10) as one, slow_link(rtt_ms=10) as other:
        with one.inside("a"):
            server = socket.create_server((ADDRESS["a"], PORT))
        with server, other.inside("b"), pytest.raises(ConnectionRefusedError):
            socket.create_connection((ADDRESS["a"], PORT), timeout=10)


def test_a_program_that_makes_no_link_is_named(tmp_path: Path) -> None:
    slow_link()  # skips where there are no namespaces
    program = tmp_path / "broken.py"
    program.write_text("raise SystemExit('no device today')")
    with (
        pytest.raises(AnabranchError, match=r"broken\.py did not bring the link up: no device today"),
        SlowLink(program),
    ):
        pass
    with pytest.raises(ConfigError, match=r"there is no .*nowhere\.py"), SlowLink(tmp_path / "nowhere.py"):
        pass
