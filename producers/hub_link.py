"""The producer's talk with the hub, on a thread of its own, so that a slow link never stalls the engine.

Invariant: the engine's thread never waits for the hub. It says how many groups it could start (`want`), takes what
has been granted (`take`), and says which groups it is done with (`release`); the thread fetches permits, keeps
leases alive, takes evaluation shards, and reports status. Permits that are held but not started are leased too. No
group is handed to the engine while it may still run an earlier attempt at it.
Held by tests/unit/producers/test_hub_link.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.boards import EvaluationBoard, RunBoard
from anabranch.transport.permits import Permit, Permits

STATUS_EVERY_S = 1.0
RETRY_LAST_S = 5.0
EVALUATION_LEASE_MS = 60_000


class HubLink:
    def __init__(
        self,
        permits: Permits,
        runs: RunBoard,
        evaluations: EvaluationBoard,
        *,
        producer: str,
        lease_ms: int,
        poll_ms: int,
        status: Callable[[], ProducerStatus],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._permits, self._runs, self._evaluations = permits, runs, evaluations
        self._producer, self._lease_ms, self._poll_s, self._status = producer, lease_ms, poll_ms / 1000, status
        self._clock = clock
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._granted: deque[Permit] = deque()
        self._held: set[int] = set()  # leased to us, started or not
        self._lost: set[int] = set()  # started, then the lease went to somebody else; until the engine lets go
        self._want = 0
        self._serving: PolicyVersion | None = None
        self._shard: tuple[PolicyVersion, int, int] | None = None
        self._posts: deque[tuple[PolicyVersion, int, dict[str, Any]]] = deque()
        self._evaluating = False
        self._next_status = self._next_renew = 0.0
        self._failure: Exception | None = None
        self.finished: str | None = None
        self.verification: str | None = None  # token of a request to verify the live weights
        self.error = ""
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="hub-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def want(self, groups: int, serving: PolicyVersion | None) -> None:
        """The engine could start `groups` more; it serves `serving`. Raises what the thread died of, if it did."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            wake = groups > self._want or serving != self._serving
            self._want, self._serving = groups, serving
        if wake:
            self._wake.set()

    def take(self, max_groups: int) -> list[Permit]:
        """Granted permits whose minimum policy is served now, lowest index first; the others stay granted."""
        with self._lock:
            if self._serving is None:
                return []
            ready = [p for p in self._granted if p.min_policy <= self._serving and p.group_index not in self._lost]
            ready = sorted(ready, key=lambda p: p.group_index)[:max_groups]
            for permit in ready:
                self._granted.remove(permit)
            return ready

    @property
    def wants_policy(self) -> PolicyVersion | None:
        """The lowest version that a granted permit asks for, when what is served is older than all of them ask for."""
        with self._lock:
            asked = min((p.min_policy for p in self._granted), default=None)
            return asked if asked is not None and self._serving is not None and asked > self._serving else None

    @property
    def evaluation_waits(self) -> bool:
        """A shard was granted and waits for the engine to be free: start nothing else before it."""
        with self._lock:
            return self._shard is not None

    def take_evaluation(self) -> tuple[PolicyVersion, int, int] | None:
        """(policy, shard, shards) to evaluate now, if one was granted for the version that is served."""
        with self._lock:
            shard, self._shard = self._shard, None
            if shard is not None and shard[0] != self._serving:
                return None  # weights were swapped meanwhile; the shard's lease runs out
            self._evaluating = self._evaluating or shard is not None
            return shard

    def post_evaluation(self, policy: PolicyVersion, shard: int, result: Mapping[str, Any]) -> None:
        with self._lock:
            self._posts.append((policy, shard, dict(result)))
            self._evaluating = False
        self._wake.set()

    def release(self, group_index: int) -> None:
        """The group is stored in its stream, or given up: stop renewing its lease."""
        with self._lock:
            if group_index in self._lost:
                self._lost.discard(group_index)  # a new permit for it may be ours already: that one stays
            else:
                self._held.discard(group_index)

    def lost(self) -> set[int]:
        """Groups whose lease went to somebody else (after a long outage): not worth finishing."""
        with self._lock:
            return set(self._lost)

    def _run(self) -> None:
        pause_s = self._poll_s
        while not self._stop.is_set():
            try:
                self.turn()
                self.error, pause_s = "", self._poll_s
            except AnabranchError as error:
                if not self.error:
                    self._log.warning("hub cannot be reached", error=str(error))
                self.error = str(error)
                pause_s = min(max(0.2, 2 * pause_s), RETRY_LAST_S)
            except Exception as error:  # noqa: BLE001 - raised again on the engine's thread, which must not idle for ever
                self.error, self._failure = repr(error), error
                return
            self._wake.wait(pause_s)
            self._wake.clear()
        with contextlib.suppress(AnabranchError):
            self._runs.report_producer(self._producer, self._status())  # how it ended

    def turn(self) -> None:
        """One round of everything that is due."""
        now = self._clock()
        while self._posts:
            self._evaluations.post(*self._posts[0])
            with self._lock:
                self._posts.popleft()
        self._take_evaluation_shard()
        if now >= self._next_renew:  # before `take`, which would hand our own expired leases out anew
            self._renew()
            self._next_renew = now + self._lease_ms / 3000
        with self._lock:
            missing = self._want - len(self._granted) if self._serving is not None else 0
        if missing > 0:
            permits = self._permits.take(self._producer, max_groups=missing, lease_ms=self._lease_ms)
            with self._lock:
                self._granted.extend(p for p in permits if p.group_index not in self._held)
                self._held.update(p.group_index for p in permits)
        if now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            self._runs.report_producer(self._producer, self._status())
            self.finished = self._runs.finished()
            self.verification = self._runs.verification_wanted()

    def _renew(self) -> None:
        with self._lock:
            held = sorted(self._held)
        gone = set(self._permits.renew(self._producer, held, lease_ms=self._lease_ms)) if held else set()
        with self._lock:
            gone &= self._held
            self._held -= gone
            self._lost |= gone - {p.group_index for p in self._granted}
            self._granted = deque(p for p in self._granted if p.group_index not in gone)

    def _take_evaluation_shard(self) -> None:
        with self._lock:
            serving, busy = self._serving, self._shard is not None or self._evaluating or bool(self._posts)
        wanted = None if busy or serving is None else self._evaluations.wanted()
        if wanted is not None and wanted[0] == serving:
            shard = self._evaluations.take(self._producer, serving, EVALUATION_LEASE_MS)
            if shard is not None:
                with self._lock:
                    self._shard = (serving, shard, wanted[1])
