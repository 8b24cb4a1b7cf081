"""A slow link to measure over: two network namespaces of this machine and a delayed, rate-limited link between them.

Invariant: namespaces, link and every process started through `run` are gone when the context ends, also after an error;
nothing else of the machine's network is touched. A process killed with SIGKILL takes its link and children along; the two
empty namespaces that it leaves go when the next link is made. Held by tests/process/test_slow_link.py.

Needs root, `ip` (iproute2) and a program that makes the link, called as
    PROGRAM NS_A IP_A NS_B IP_B --delay-ms D --rate-mbit R --loss P --queue-ms Q --seconds S
which prints a line that begins with "link up" once it carries packets. Delay is one way: D = 75 is a round trip of 150 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from anabranch.schemas.errors import AnabranchError, ConfigError, DeadlineError
from anabranch.transport.runtime import bound_to_parent

Side = Literal["a", "b"]
SIDES: tuple[Side, Side] = ("a", "b")
ADDRESS: dict[Side, str] = {"a": "10.77.0.1", "b": "10.77.0.2"}
_CLONE_NEWNET = 0x40000000
_START_S = 15.0
_numbers = itertools.count()


def why_not(program: Path) -> str:
    """What this machine lacks for a slow link made by `program`; "" if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun (modprobe tun)"
    if not program.is_file():
        return f"there is no {program}, the program that makes the link"
    try:
        found = subprocess.run(["ip", "netns", "list"], capture_output=True, timeout=_START_S, check=False)
    except FileNotFoundError:
        return "there is no `ip` command (package iproute2)"
    return "" if found.returncode == 0 else f"`ip netns` does not work here: {found.stderr.decode().strip()}"


class SlowLink:
    """Side "a" (the hub) and side "b" (a region), `rtt_ms` apart. Enter it from a thread that lives as long as it should."""

    def __init__(
        self,
        program: Path,
        *,
        rtt_ms: float = 150.0,
        rate_mbit: float = 100.0,
        loss: float = 0.0,
        queue_ms: float = 100.0,
        seconds: float = 300.0,
    ) -> None:
        self.rtt_s, self.rate_bytes_s = rtt_ms / 1e3, rate_mbit * 1e6 / 8
        self._program = program
        options = {
            "--delay-ms": rtt_ms / 2, "--rate-mbit": rate_mbit, "--loss": loss, "--queue-ms": queue_ms,
            "--seconds": seconds,
        }  # fmt: skip
        self._options = [word for key, value in options.items() for word in (key, f"{value:g}")]
        number = next(_numbers)
        self.namespaces: dict[Side, str] = {side: f"ab{os.getpid()}.{number}{side}" for side in SIDES}
        self._made: list[str] = []
        self._link: subprocess.Popen[str] | None = None
        self._children: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        """Raises ConfigError: something is missing here; DeadlineError, AnabranchError: the link does not come up."""
        if lacking := why_not(self._program):
            raise ConfigError(f"no slow link: {lacking}")
        try:
            _remove_left_behind()
            for side in SIDES:
                ip_command("netns", "add", self.namespaces[side])
                self._made.append(self.namespaces[side])
                ip_command("-n", self.namespaces[side], "link", "set", "lo", "up")
            self._start_link()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start_link(self) -> None:
        ends = [word for side in SIDES for word in (self.namespaces[side], ADDRESS[side])]
        self._link = subprocess.Popen(
            bound_to_parent([sys.executable, "-I", str(self._program), *ends, *self._options]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._link.stdout is not None
        ready, _, _ = select.select([self._link.stdout], [], [], _START_S)
        if not ready:
            raise DeadlineError.waiting_for(f"{self._program.name} to bring the link up", _START_S, "it says nothing")
        line = self._link.stdout.readline()
        if not line.startswith("link up"):
            rest = self._link.communicate(timeout=_START_S)[0]
            raise AnabranchError(f"{self._program.name} did not bring the link up: {(line + rest).strip()[-400:]}")

    def run(self, side: Side, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `argv` on that side; it ends with the link at the latest. `options` as of subprocess.Popen."""
        command = ["/usr/bin/env", "ip", "netns", "exec", self.namespaces[side], *argv]
        child: subprocess.Popen[Any] = subprocess.Popen(bound_to_parent(command), **options)
        self._children.append(child)
        return child

    @contextlib.contextmanager
    def inside(self, side: Side) -> Iterator[None]:
        """This thread is on that side: sockets it opens, threads and processes it starts are there, and stay there."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.namespaces[side]}") as there:
            set_namespace(there.fileno())
            try:
                yield
            finally:
                set_namespace(before.fileno())

    def set_kernel(self, name: str, value: str) -> None:
        """Set a per-namespace sysctl (`net.ipv4...`) on both sides. Raises AnabranchError if the kernel refuses."""
        for side in SIDES:
            with self.inside(side):
                try:
                    Path("/proc/sys", name.replace(".", "/")).write_text(value)
                except OSError as error:
                    raise AnabranchError(f"{name}={value} is refused by this kernel: {error.strerror}") from error

    def set_congestion_control(self, name: str) -> None:
        """For connections made from now on, by the routes of the link: the kernel's default is not for a namespace to set.

        Raises AnabranchError: the kernel does not have it.
        """
        ends: tuple[tuple[Side, Side], ...] = (("a", "b"), ("b", "a"))
        for side, peer in ends:
            namespace = self.namespaces[side]
            device = json.loads(ip_command("-n", namespace, "-j", "route", "get", ADDRESS[peer]))[0]["dev"]
            ip_command("-n", namespace, "route", "replace", ADDRESS[peer], "dev", device, "congctl", name)

    def received_bytes(self, side: Side) -> int:
        """Bytes, IP headers included, that have come out of the link on that side."""
        links = json.loads(ip_command("-n", self.namespaces[side], "-s", "-j", "link", "show"))
        return sum(int(link["stats64"]["rx"]["bytes"]) for link in links if link["ifname"] != "lo")

    def cut(self) -> None:
        """Nothing crosses until `mend`; what was on its way arrives then, unless the devices' queues ran over."""
        assert self._link is not None
        self._link.send_signal(signal.SIGSTOP)

    def mend(self) -> None:
        assert self._link is not None
        self._link.send_signal(signal.SIGCONT)

    def close(self) -> None:
        link = [self._link] if self._link is not None else []
        for process in [*reversed(self._children), *link]:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        end = time.monotonic() + 5.0
        for process in [*self._children, *link]:
            try:
                process.wait(max(0.05, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5.0)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._children, self._link = [], None
        while self._made:
            ip_command("netns", "del", self._made.pop())


def _remove_left_behind() -> None:
    """Namespaces of ours whose process is gone."""
    for name in ip_command("netns", "list").split():
        ours = re.fullmatch(r"ab(\d+)\.\d+[ab]", name)
        if ours and not Path("/proc", ours[1]).exists():
            with contextlib.suppress(AnabranchError):  # another process may be doing the same
                ip_command("netns", "del", name)


def set_namespace(fd: int) -> None:
    """This thread is in the network namespace that `fd` stands for, from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        raise AnabranchError(f"setns failed: {os.strerror(ctypes.get_errno())}")


def ip_command(*words: str) -> str:
    """What `ip WORDS` prints. Raises AnabranchError when it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_START_S, check=False)
    if done.returncode:
        raise AnabranchError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
