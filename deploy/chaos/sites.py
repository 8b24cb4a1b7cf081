"""The places of a chaos run: network namespaces joined by user-space links, and small disks, all of them ours alone.

Invariant: everything is made in a mount namespace that this process takes for itself (its own /run/netns included), so
namespaces and disks are gone when the last process in it is, also after kill −9; nothing of the machine's own network or
mounts changes. Held by tests/process/test_chaos.py.

Each region has an address of its own on its loopback, and so has the hub towards each: servers stay bound and reachable at
home while the link, whose end carries the same address, is away.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from anabranch.deploy.slow_link import ip_command, set_namespace
from anabranch.schemas.errors import AnabranchError

HUB = "hub"
REGION_NAMES = ("east", "west", "north", "south")
PORT = 6379
_NETNS = Path("/run/netns")
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x4000, 0x40000, 2


class Sites:
    """The hub and `regions`, made by entering; the main thread's mount namespace is another one from then on."""

    def __init__(self, regions: Sequence[str]) -> None:
        self.regions = tuple(regions)
        self._mounted: list[Path] = []

    @property
    def names(self) -> tuple[str, ...]:
        return (HUB, *self.regions)

    def hub_address(self, region: str) -> str:
        """Of the hub, as `region` sees it."""
        return f"10.78.{self.regions.index(region) + 1}.1"

    def address(self, region: str) -> str:
        return f"10.78.{self.regions.index(region) + 1}.2"

    def addresses(self, site: str) -> list[str]:
        """What the server of `site` listens on, beside 127.0.0.1."""
        return [self.hub_address(r) for r in self.regions] if site == HUB else [self.address(site)]

    def __enter__(self) -> Sites:
        """Raises AnabranchError: the kernel or `ip` refuses."""
        _private_mounts()
        _NETNS.mkdir(parents=True, exist_ok=True)
        self.disk(_NETNS, 2**20)
        for name in self.names:
            ip_command("netns", "add", name)
            ip_command("-n", name, "link", "set", "lo", "up")
            for address in self.addresses(name):
                ip_command("-n", name, "addr", "add", f"{address}/32", "dev", "lo")
        return self

    def __exit__(self, *_: object) -> None:
        for path in reversed(self._mounted):
            _umount(path)

    def disk(self, path: Path, size_bytes: int) -> Path:
        """A file system of its own of `size_bytes`, at `path` (a folder, made if missing)."""
        path.mkdir(parents=True, exist_ok=True)
        _mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, f"size={size_bytes},mode=0755".encode())
        self._mounted.append(path)
        return path

    def command(self, site: str, argv: Sequence[str]) -> tuple[str, ...]:
        """`argv`, to be run on `site`."""
        return ("/usr/bin/env", "ip", "netns", "exec", site, *argv)

    @contextlib.contextmanager
    def inside(self, site: str) -> Iterator[None]:
        """This thread is there: abstract sockets it binds are found by processes of `site`, and by no others."""
        with open("/proc/thread-self/ns/net") as before, open(_NETNS / site) as there:
            set_namespace(there.fileno())
            try:
                yield
            finally:
                set_namespace(before.fileno())


def _private_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise AnabranchError(f"no mount namespace of our own: {os.strerror(ctypes.get_errno())}")
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source, target, kind, ctypes.c_ulong(flags), data):
        raise AnabranchError(f"mount at {target.decode()} failed: {os.strerror(ctypes.get_errno())}")


def _umount(path: Path) -> None:
    ctypes.CDLL(None).umount2(str(path).encode(), _MNT_DETACH)
