"""Tells the hub which version of the weights this producer may still need, so that retention leaves it there.

Invariant: while this producer lives and reaches the hub, its lease is never older than `lease_ms` / 3 and never names a
version newer than what it needs. A hub that cannot be reached stops nothing here: leases are a courtesy to retention, and a
follower whose versions are gone starts from an anchor. What fails is in `error`, whatever it is, and tried again. Held by
tests/unit/producers/test_lease_keeper.py.
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

    def head(self) -> PolicyVersion | None: ...


class LeaseKeeper:
    """Runs on a thread of its own; `leases` is used by that thread alone."""

    def __init__(self, leases: Leases, holder: str, *, lease_ms: int) -> None:
        self._leases, self._holder, self._lease_ms = leases, holder, lease_ms
        self._wanted: PolicyVersion | None = None
        self._held: PolicyVersion | None = None
        self._head: PolicyVersion | None = None
        self._asked = False  # for the hub's head
        self._change = threading.Condition()
        self._stopping = False
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def protect(self, policy: PolicyVersion, *, wait_s: float = 0.0) -> bool:
        """From now on versions from `policy` on are needed. A newer one than before is told the hub at the next renewal; an
        older one, or the first, at once, and that is waited for, up to `wait_s`: True then, since retention may have acted
        until that moment. A hub that is known to be away is not waited for."""
        with self._change:
            self._wanted = policy
            if self._held is not None and self._held <= policy:
                return False
            self._change.notify_all()
            if wait_s and not self.error and self._thread.is_alive():
                self._change.wait_for(lambda: bool(self.error) or self._is_held(policy), wait_s)
            return self._is_held(policy)

    def hub_head(self, *, wait_s: float) -> PolicyVersion | None:
        """The hub's head, asked anew; None if it has none, or does not answer within `wait_s`."""
        with self._change:
            if not self._thread.is_alive():
                return None
            self._asked, self._head = True, None
            self._change.notify_all()
            self._change.wait_for(lambda: not self._asked, wait_s)
            return self._head

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
                while not (self._stopping or self._asked or self._is_due(due_s)):
                    self._change.wait(max(0.0, due_s - time.monotonic()) if self._wanted is not None else None)
                wanted, stopping, asked = self._wanted, self._stopping, self._asked
            try:
                if stopping:
                    if self._held is not None:
                        self._leases.release(self._holder)
                    return
                if asked:
                    self._answer(self._leases.head())
                    self.error = "" if wanted is None else self.error
                if wanted is not None and self._is_due(due_s):
                    self._leases.lease(self._holder, wanted, ttl_ms=self._lease_ms)
                    due_s, self.error = time.monotonic() + renew_s, ""
                    with self._change:
                        self._held = wanted
                        self._change.notify_all()
            except Exception as error:  # noqa: BLE001 - a thread that ended unseen would let the lease run out
                if stopping:
                    return
                said = str(error) if isinstance(error, AnabranchError) else repr(error)
                if said != self.error:
                    structlog.get_logger().warning("weight lease not renewed", error=said)
                with self._change:
                    self.error, self._held = said, None
                    if asked:
                        self._answer(None)
                    self._change.notify_all()
                    self._change.wait_for(lambda: self._stopping, min(RETRY_S, renew_s))
                due_s = 0.0

    def _answer(self, head: PolicyVersion | None) -> None:
        with self._change:
            self._asked, self._head = False, head
            self._change.notify_all()

    def _is_held(self, policy: PolicyVersion) -> bool:
        return self._held is not None and self._held <= policy

    def _is_due(self, due_s: float) -> bool:
        wanted, held = self._wanted, self._held
        if wanted is None:
            return False
        return held is None or wanted < held or time.monotonic() >= due_s
