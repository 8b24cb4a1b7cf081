"""The producer's talk with the hub, on a thread of its own, so that a slow link never stalls the engine.

Invariant: the engine's thread never waits for the hub. It says how many groups it could start (`want`), takes what has been
granted (`take`), and says what became of each: `hold` (finished, on its way to its stream), `release` (in its stream, or not
ours any more), `give_up` (it cannot be finished here) or `hand_back` (it could be, and will not). The thread fetches
permits, keeps leases alive, takes evaluation shards, and reports status; what an earlier process of this producer held and
left no trace of in the spool is surrendered before anything else is taken. Permits that are held but not started are leased
too, and handed back when the weights they ask for do not come. No group is handed to the engine while it may still run an
earlier attempt at it. A hub that answers again, or has room again, is back in use within `RETRY_LAST_S`.
Held by tests/unit/producers/test_hub_link.py and tests/unit/producers/test_hub_link_leases.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import structlog

from anabranch.producers.permit_book import PermitBook
from anabranch.schemas.errors import AnabranchError, BackpressureError
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.boards import EvaluationBoard, RunBoard
from anabranch.transport.permits import Permit, Permits

STATUS_EVERY_S = 1.0
RETRY_LAST_S = 2.0
EVALUATION_LEASE_MS = 60_000


class HubLink:
    """Args:
    max_attempts: a group index given up so often is abandoned.
    hold_s: how long a finished group keeps its lease while its region's stream cannot take it.
    """

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
        max_attempts: int = 3,
        hold_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._permits, self._runs, self._evaluations = permits, runs, evaluations
        self._producer, self._lease_ms, self._poll_s, self._status = producer, lease_ms, poll_ms / 1000, status
        self._max_attempts, self._hold_s = max_attempts, hold_s
        self._clock, self._clock_ms = clock, clock_ms
        self._book = PermitBook()
        self._surrenders: deque[tuple[str, set[int]]] = deque([(producer, set())])
        self._lock = threading.Lock()  # over what follows
        self._wake, self._stop = threading.Event(), threading.Event()
        self._want = 0
        self._serving: PolicyVersion | None = None
        self._shard: tuple[PolicyVersion, int, int] | None = None
        self._posts: deque[tuple[PolicyVersion, int, dict[str, Any]]] = deque()
        self._evaluating: tuple[PolicyVersion, int] | None = None
        self._next_status = self._next_renew = self._next_shard_renew = 0.0
        self._failure: Exception | None = None
        self.finished: str | None = None
        self.verification: str | None = None  # token of a request to verify the live weights
        self.error = ""
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="hub-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def resume(self, *, spooled: Collection[int], waiting: Collection[int]) -> None:
        """Before `start`: what the spool holds of an earlier process. The leases of `spooled` groups (not known to be
        settled) are not surrendered; of those, the leases of `waiting` ones (not in their stream) are kept alive."""
        self._surrenders[0] = (self._producer, {*spooled, *waiting})
        self._book.hold(waiting, self._clock() + self._hold_s)

    def surrender_for(self, producer: str, *, spooled: Collection[int]) -> None:
        """The process of another `producer` is gone and its spool is ours now: what it held beyond `spooled` groups is
        handed out again at once. Any thread."""
        self._surrenders.append((producer, set(spooled)))
        self._wake.set()

    def close(self) -> None:
        """Nothing more will be started: permits at hand go back to the hub, if it answers."""
        self._book.hand_back_granted()
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
            serving = self._serving
        return self._book.take(serving, max_groups)

    @property
    def wants_policy(self) -> PolicyVersion | None:
        """The lowest version that a permit asks for, when what is served is older than all of them ask for."""
        with self._lock:
            serving = self._serving
        return self._book.wants_policy(serving)

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
            if shard is not None:
                self._evaluating = shard[:2]
            return shard

    def post_evaluation(self, policy: PolicyVersion, shard: int, result: Mapping[str, Any]) -> None:
        with self._lock:
            self._posts.append((policy, shard, dict(result)))
            self._evaluating = None
        self._wake.set()

    def drop_evaluation(self) -> None:
        """The shard taken last will have no result from us; its lease runs out."""
        with self._lock:
            self._evaluating = None

    def hold(self, group_index: int) -> None:
        """The group is finished and spooled: its lease goes on until `release`, and for `hold_s` at most."""
        self._book.hold([group_index], self._clock() + self._hold_s)

    def release(self, group_index: int) -> None:
        """The group is stored in its stream, or was lost to somebody else: stop renewing its lease."""
        self._book.release(group_index)

    def give_up(self, group_index: int) -> None:
        """The group cannot be finished by its deadline: its next attempt is somebody's at once, if it has any left."""
        self._book.hand_back(group_index, failed=True)
        self._wake.set()

    def hand_back(self, group_index: int) -> None:
        """The group will not be finished here, for no fault of its own."""
        self._book.hand_back(group_index, failed=False)
        self._wake.set()

    def hand_back_granted(self) -> None:
        """What has not been started will not be before long."""
        self._book.hand_back_granted()

    def lost(self) -> set[int]:
        """Groups whose lease went to somebody else (after a long outage): not worth finishing."""
        return self._book.lost()

    def _run(self) -> None:
        pause_s = self._poll_s
        while not self._stop.is_set():
            try:
                self.turn()
                self.error, pause_s = "", self._poll_s
            except AnabranchError as error:
                if not self.error:
                    self._log.warning("the hub is away or full", error=str(error))
                self.error = str(error)
                pause_s = min(max(0.2, 2 * pause_s), RETRY_LAST_S)
            except Exception as error:  # noqa: BLE001 - raised again on the engine's thread, which must not idle for ever
                self.error, self._failure = repr(error), error
                return
            self._wake.wait(pause_s)
            self._wake.clear()
        with contextlib.suppress(AnabranchError):
            self._hand_back()
            self._runs.report_producer(self._producer, self._status())  # how it ended

    def turn(self) -> None:
        """One round of everything that is due. A hub that is full still takes what frees, and what only moves things."""
        now = self._clock()
        refused: BackpressureError | None = None
        # Renewal comes before `take`, which would hand our own expired leases out anew.
        for act in (
            self._surrender,
            self._post,
            self._hand_back,
            self._renew,
            self._take_shard,
            self._fetch,
            self._report,
        ):
            try:
                act(now)
            except BackpressureError as error:
                refused = error
        if refused is not None:
            raise refused

    def _surrender(self, _: float) -> None:
        while self._surrenders:
            producer, keep = self._surrenders[0]
            handed_back = self._permits.surrender(producer, keep=keep)
            if handed_back:
                self._log.info("handed back what an earlier process held", producer=producer, groups=handed_back)
            self._surrenders.popleft()

    def _post(self, _: float) -> None:
        while self._posts:
            self._evaluations.post(*self._posts[0])
            with self._lock:
                self._posts.popleft()

    def _hand_back(self, _: float = 0.0) -> None:
        for failed, most in ((True, self._max_attempts), (False, None)):
            indices = self._book.handed_back(failed=failed)
            if indices:
                abandoned = self._permits.give_up(self._producer, indices, max_attempts=most)
                self._book.heard(indices)
                if abandoned:
                    self._log.error("groups abandoned", groups=abandoned, attempts=self._max_attempts)

    def _renew(self, now: float) -> None:
        if now < self._next_renew:
            return
        ours = self._book.to_renew(now)
        if ours:
            self._book.gone(self._permits.renew(self._producer, ours, lease_ms=self._lease_ms))
        self._next_renew = now + self._lease_ms / 3000

    def _fetch(self, now: float) -> None:
        with self._lock:
            want, serving = self._want, self._serving
        if self._surrenders:
            return  # it would go with what is taken now
        self._book.hand_back_stale(serving, now - self._lease_ms / 1000)
        missing = want - self._book.granted
        if missing > 0 and self._book.may_take(serving):
            permits = self._permits.take(self._producer, max_groups=missing, lease_ms=self._lease_ms)
            granted_ms = self._clock_ms()
            self._book.grant([replace(permit, granted_ms=granted_ms) for permit in permits], now)

    def _report(self, now: float) -> None:
        if now < self._next_status:
            return
        self._next_status = now + STATUS_EVERY_S
        self.finished = self._runs.finished()
        self.verification = self._runs.verification_wanted()
        self._runs.report_producer(self._producer, self._status())

    def _take_shard(self, now: float) -> None:
        with self._lock:
            serving, busy = self._serving, bool(self._posts)
            under_way = self._shard[:2] if self._shard is not None else self._evaluating
        if under_way is not None:
            if now >= self._next_shard_renew:
                self._evaluations.renew(self._producer, *under_way, EVALUATION_LEASE_MS)
                self._next_shard_renew = now + EVALUATION_LEASE_MS / 3000
            return
        wanted = None if busy or serving is None else self._evaluations.wanted()
        if wanted is not None and wanted[0] == serving:
            shard = self._evaluations.take(self._producer, serving, EVALUATION_LEASE_MS)
            if shard is not None:
                self._next_shard_renew = now + EVALUATION_LEASE_MS / 3000
                with self._lock:
                    self._shard = (serving, shard, wanted[1])
