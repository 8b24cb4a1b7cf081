"""`anabranch view` as a process: where it listens, and what it says."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.replay_runs import write_run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@contextlib.contextmanager
def viewing(*args: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "anabranch.cli.main", "view", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("viewer: ").strip(), process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def test_on_loopback_it_needs_no_token_and_ends_with_ctrl_c(tmp_path: Path):
    with viewing(str(write_run(tmp_path / "run")), "--port", "0") as (address, process):
        assert address.startswith("http://127.0.0.1:")
        assert "of 14" in httpx.get(f"{address}trajectories").text
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode in (0, 130), err
        assert "Traceback" not in err


def test_elsewhere_it_wants_the_token_that_it_printed(tmp_path: Path):
    with viewing(str(write_run(tmp_path / "run")), "--port", "0", "--host", "0.0.0.0") as (address, _):
        base, _, token = address.partition("?token=")
        base = base.replace("0.0.0.0", "127.0.0.1")
        assert len(token) >= 30
        assert httpx.get(base).status_code == 403
        with httpx.Client(follow_redirects=True) as client:
            answer = client.get(f"{base}?token={token}")
            assert answer.status_code == 200
            assert token not in str(answer.url)
            assert token not in answer.text


def test_a_port_that_is_taken_is_told(tmp_path: Path):
    run = write_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-I", "-m", "anabranch.cli.main", "view", str(run), "--port", str(taken.getsockname()[1])],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 75
    assert "choose another --port" in done.stderr


@pytest.mark.parametrize(
    ("args", "why"), [(("nowhere",), "there is no run directory"), (("x", "--port", "70000"), "--port: at most 65535"), (("x", "--streams"), "--streams needs --config")]
)  # fmt: skip
def test_what_is_wrong_is_one_line(args: tuple[str, ...], why: str):
    done = subprocess.run(
        [sys.executable, "-I", "-m", "anabranch.cli.main", "view", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, why in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr
