"""The link between the hub and one region: a user-space program that can be stopped, or made again with other properties.

Invariant: one process per link, ended with this one; a link that ended by itself is made again by `tend`.
Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from anabranch.deploy.chaos.sites import HUB, Sites
from anabranch.schemas.errors import DeadlineError
from anabranch.transport.runtime import bound_to_parent

RTT_MS = 10.0
RATE_MBIT = 200.0
_START_S = 30.0


class Link:
    """`program` as deploy/slow_link.py describes it. Call everything from the main thread, which the link dies with."""

    def __init__(self, program: Path, sites: Sites, region: str, log: Path) -> None:
        self.region = region
        self._program, self._sites, self._log = program, sites, log
        self._process: subprocess.Popen[bytes] | None = None
        self._properties: tuple[float, float] = (RTT_MS, 0.0)
        self.starts = 0

    def make(self, *, rtt_ms: float = RTT_MS, loss: float = 0.0) -> None:
        """A new link with these properties in the place of the present one; `up` says when it carries packets."""
        self._properties = (rtt_ms, loss)
        self._end()
        sites, region = self._sites, self.region
        self.starts += 1
        words = [HUB, sites.hub_address(region), region, sites.address(region)]
        options = {
            "--delay-ms": rtt_ms / 2, "--loss": loss, "--rate-mbit": RATE_MBIT, "--queue-ms": 200, "--seconds": 1e6,
            "--seed": self.starts,
        }  # fmt: skip
        words += [word for name, value in options.items() for word in (name, f"{value:g}")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                bound_to_parent([sys.executable, "-I", str(self._program), *words]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def up(self) -> bool:
        running = self._process is not None and self._process.poll() is None
        return running and b"link up" in self._log.read_bytes()

    def wait_up(self) -> None:
        end = time.monotonic() + _START_S
        while not self.up:
            if time.monotonic() > end or self._process is None or self._process.poll() is not None:
                said = self._log.read_text(errors="replace")[-400:]
                raise DeadlineError.waiting_for(f"the link to {self.region} to come up", _START_S, said)
            time.sleep(0.05)

    def tend(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            rtt_ms, loss = self._properties
            self.make(rtt_ms=rtt_ms, loss=loss)

    def cut(self) -> None:
        """Nothing crosses until `mend`; connections stay as they are."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def mend(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10.0)
            self._process = None
