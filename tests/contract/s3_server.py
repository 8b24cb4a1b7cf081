"""A real S3-compatible server process (moto) for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from anabranch.transport.runtime import bound_to_parent

BUCKET = "weights"
START_S = 60


class S3Server:
    """Answers at `endpoint` until it is closed; what is put lives in its memory."""

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            bound_to_parent([sys.executable, "-I", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self._process.poll() is None, f"the S3 server ended; see {self._log.name}"
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.make_bucket(BUCKET)
                return
            time.sleep(0.1)
        raise AssertionError(f"the S3 server did not start within {START_S} s; see {self._log.name}")

    def make_bucket(self, name: str) -> None:
        self.request("PUT", f"/{name}")

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """What this client may do without a signature: moto checks none."""
        made = urllib.request.Request(self.endpoint + path, data=body, method=method)
        made.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request")
        with urllib.request.urlopen(made, timeout=10) as answer:
            return answer.read()

    def options(self) -> dict[str, str]:
        return {"endpoint": self.endpoint, "region": "us-east-1", "allow_http": "true"}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._log.close()


@contextlib.contextmanager
def s3_server(log: Path) -> Iterator[S3Server]:
    server = S3Server(log)
    try:
        server.wait()
        yield server
    finally:
        server.close()
