"""Tells the hub which version of the weights this producer may still need, so that retention leaves it there.

Invariant: while this producer lives and reaches the hub, its lease is never older than `lease_ms` / 3 and never names a
version newer than what it needs. A hub that cannot be reached stops nothing here: leases are a courtesy to retention, and a
follower whose versions are gone starts from an anchor. Held by tests/unit/producers/test_lease_keeper.py.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

import structlog

from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.versions import PolicyVersion

RETRY_S = 1.0


class Leases(Protocol):
    """What of a `WeightChannel` on the hub this needs."""

    def lease(self, holder: str, policy: PolicyVersion, *, ttl_ms: int) -> None: ...

    def release(self, holder: str) -> None: ...


class LeaseKeeper:
    """Runs on a thread of its own; `leases` is used by that thread alone."""

    def __init__(self, leases: Leases, holder: str, *, lease_ms: int) -> None:
        self._leases, self._holder, self._lease_ms = leases, holder, lease_ms
        self._wanted: PolicyVersion | None = None
        self._held: PolicyVersion | None = None
        self._change = threading.Condition()
        self._stopping = False
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def protect(self, policy: PolicyVersion, *, wait_s: float = 0.0) -> None:
        """From now on versions from `policy` on are needed. An older one than before is told the hub at once (and waited
        for, up to `wait_s`); a newer one is told at the next renewal."""
        with self._change:
            self._wanted = policy
            if self._held is None or policy < self._held:
                self._change.notify_all()
                if wait_s and self._thread.is_alive():
                    self._change.wait_for(lambda: self._held is not None and self._held <= policy, wait_s)

    def close(self) -> None:
        """Give the lease back, if the hub answers."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        renew_s = self._lease_ms / 3000
        due_s = 0.0
        while True:
            with self._change:
                while not self._stopping and not self._is_due(due_s):
                    self._change.wait(max(0.0, due_s - time.monotonic()) if self._wanted is not None else None)
                wanted, stopping = self._wanted, self._stopping
            try:
                if stopping:
                    if self._held is not None:
                        self._leases.release(self._holder)
                    return
                assert wanted is not None
                self._leases.lease(self._holder, wanted, ttl_ms=self._lease_ms)
                due_s, self.error = time.monotonic() + renew_s, ""
                with self._change:
                    self._held = wanted
                    self._change.notify_all()
            except AnabranchError as error:
                if stopping:
                    return
                if not self.error:
                    structlog.get_logger().warning("weight lease not renewed", error=str(error))
                self.error = str(error)
                with self._change:
                    self._held = None
                    self._change.wait_for(lambda: self._stopping, min(RETRY_S, renew_s))
                due_s = 0.0

    def _is_due(self, due_s: float) -> bool:
        wanted, held = self._wanted, self._held
        if wanted is None:
            return False
        return held is None or wanted < held or time.monotonic() >= due_s
