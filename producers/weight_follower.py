"""Follows the weight channel in the background and offers the engine what is new.

Invariant: what `hold` hands out is a version whose digest was checked against its manifest, and the mirror does not change
until `confirm` or `reject`; the version served is only what `confirm` was told. Of a node's followers one at a time fetches,
the others see the mirror move. Whatever fails leaves the engine on its old version, is visible in `last_error` until this
follower's own attempt works or the mirror moves (a neighbour's failure is, too), and is tried again after the node's pause: a
broken chunk alone, then a path around its manifest, in the end an anchor. A head older than what is served, or, at
the start, older than the hub's, is refused. A configuration that cannot work ends the producer before it serves anything,
not after (a server's refusal may pass). Held by tests/unit/producers/test_weight_follower.py and tests/process/test_weight_kills.py.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

import structlog

from anabranch.producers.change_log import Changed
from anabranch.producers.fetcher import Fetcher
from anabranch.producers.lease_keeper import LeaseKeeper
from anabranch.producers.mirror_memory import Content
from anabranch.producers.node_mirror import NodeMirror
from anabranch.producers.node_turn import FollowerState, NodeTurn
from anabranch.producers.turn_failures import RETRY_FIRST_S, RETRY_LAST_S
from anabranch.producers.weight_advance import Advancer, News
from anabranch.producers.weight_plan import Check, Planner
from anabranch.schemas.errors import AnabranchError, ConfigError, ManifestError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.retry import backoff_s
from anabranch.transport.weight_channel import WeightChannel

HEAD_WAIT_S = 5.0  # for the hub to say what its head is; without an answer the channel's is taken


@dataclass(frozen=True, slots=True)
class Staged:
    """A verified update: the mirror holds `policy`; `changed` is what differs from the version last confirmed. `path` and
    `fetched_bytes` say how the mirror came to it, whichever process fetched that."""

    policy: PolicyVersion
    digest: str
    changed: Changed
    fetched_bytes: int
    path: tuple[str, ...]
    published_ms: int
    seq: int = 0


class WeightFollower:
    """Runs `poll_once` on a thread of its own. The engine's thread asks `staged`, then `hold`s, swaps, and `confirm`s or
    `reject`s."""

    def __init__(
        self,
        channel: WeightChannel,
        mirror: NodeMirror,
        *,
        run: str,
        poll_ms: int,
        fetch_threads: int = 8,
        verify: Check | None = None,
        leases: LeaseKeeper | None = None,
    ) -> None:
        self._channel, self.mirror, self._leases = channel, mirror, leases
        self._stop, self._wake, self._ready = threading.Event(), threading.Event(), threading.Event()
        self._fetcher = Fetcher(channel.blobs, fetch_threads, stop=self._stop, on_chunk=mirror.note_progress)
        planner = Planner(channel, mirror.layout, run=run, verify=verify)
        advancer = Advancer(mirror, planner, self._fetcher, mirror.workers, leases)
        self._turn = NodeTurn(mirror, advancer, self._stop)
        self._end: FollowerState | None = None
        self._poll_s = poll_ms / 1000
        self._lock = threading.Lock()
        self._offer: Staged | None = None
        self._held: Staged | None = None
        self._confirmed: Staged | None = None
        self._refused: tuple[int, int, float] = (0, 0, 0.0)  # seq, times, not to be offered again before
        self._oldest: PolicyVersion | None = None  # that may be started from
        self._fatal: Exception | None = None
        self._swap_error = self._follow_error = self._node_error = ""
        self._failures, self._failed_at = 0, 0  # in a row, and the mirror's number at the last one
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run_thread, name="weight-follower", daemon=True)

    @property
    def state(self) -> FollowerState:
        return self._end or self._turn.state

    @property
    def last_error(self) -> str:
        own = self._swap_error or self._follow_error
        return own or self._node_error or (self._leases.error if self._leases else "")

    @property
    def fetched_bytes(self) -> int:
        """By this process, since it started."""
        return self._fetcher.fetched_bytes

    @property
    def serving(self) -> Staged | None:
        """What was confirmed last."""
        return self._confirmed

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._fetcher.close()
        self._end = FollowerState.CLOSED

    # The engine's thread

    def staged(self, *, wait_s: float = 0.0) -> Staged | None:
        """What could be swapped in now, if anything; it may be superseded until it is held. Raises what following has
        failed of for good: a ConfigError before anything was served, or a mistake of our own."""
        if wait_s:
            self._ready.wait(wait_s)
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            return self._offer

    def hold(self) -> Staged | None:
        """The newest update; the mirror stays as it is until `confirm` or `reject`. None if there is none, or while the
        mirror is being written: ask again after the next step. Never waits."""
        with self._lock:
            assert self._held is None, "hold of an update while another one is held"
            offer = self._offer
            if offer is None or not self.mirror.hold():
                return None
            content = self.mirror.content()
            if content is None or not self._is_news(content):
                self._clear_offer()
                self.mirror.let_go()
                return None
            self._held = offer if content.seq == offer.seq else self._stage(content)
            return self._held

    def confirm(self, staged: Staged) -> None:
        """The engine serves `staged.policy`: go on following."""
        with self._lock:
            self._let_go(staged)
            self._confirmed, self._swap_error = replace(staged, changed={}), ""
            self._refused = (0, 0, 0.0)

    def reject(self, staged: Staged, reason: str) -> None:
        """The engine refused `staged` and still serves its old version. It is offered again after a pause, or with what
        comes next."""
        with self._lock:
            self._let_go(staged)
            seq, times, _ = self._refused
            times = times + 1 if seq == staged.seq else 1
            pause_s = min(RETRY_FIRST_S * 2.0 ** (times - 1), RETRY_LAST_S) if times < 16 else RETRY_LAST_S
            self._refused = staged.seq, times, time.monotonic() + pause_s
            self._swap_error = reason

    def _let_go(self, staged: Staged) -> None:
        assert self._held is staged, "this update is not held"
        self._held = None
        self.mirror.let_go()
        self._clear_offer()
        self._wake.set()

    # The follower's thread

    def poll_once(self) -> bool:
        """Look at the head; take the mirror there, if no other process of the node does; offer what is new. True if
        there is a new offer."""
        content, news = self.mirror.content(), None
        if content is None:
            head = self._channel.head()
        else:
            head, entries = self._channel.news(content.policy)
            news = News(content.policy, entries)
        if head is None:
            self._worked()
            return False
        confirmed = self._confirmed
        if confirmed is not None and head < confirmed.policy:
            raise ManifestError(
                f"the channel's head {head} is older than {confirmed.policy}, which is served: a replica that has fallen "
                "behind, or a hub restored from a backup; it is not followed"
            )
        if confirmed is None:
            self._check_start(head if content is None else max(head, content.policy))
        waits = False
        if content is None or content.policy < head:
            waits = not self._turn.take(head, news)
            content = self.mirror.content()
            if waits and not self.mirror.failures.is_mine:
                self._fetcher.keep_little()
        else:
            self._turn.state = FollowerState.POLLING
            self._fetcher.forget()
        offered = False
        if content is not None and (content.policy >= head or content.policy == self.mirror.goal):
            if self._leases is not None:
                self._leases.protect(content.policy)
            offered = self._make_offer(content)
        if not waits or self.mirror.progress[0] != self._failed_at:
            self._worked()
        self._node_error = self.mirror.failures.reason() if waits else ""
        return offered

    def _worked(self) -> None:
        self._failures, self._follow_error = 0, ""

    def _check_start(self, reach: PolicyVersion) -> None:
        """Nothing is served yet, so nothing tells an old head from a new one, and a head bears no signature: what this
        producer starts from is not older than what the hub had when it began. Raises ManifestError."""
        if self._leases is not None and self._oldest is None:
            self._oldest = self._leases.hub_head(wait_s=HEAD_WAIT_S)
        if self._oldest is not None and reach < self._oldest:
            raise ManifestError(
                f"the channel's head is {reach} here, and was {self._oldest} on the hub already when this producer began: "
                "a replica that has not caught up, or shows old weights; nothing is started from it"
            )

    def _make_offer(self, content: Content) -> bool:
        with self._lock:
            offer = self._offer
            seq, _, not_before_s = self._refused
            stands = offer is not None and offer.seq == content.seq
            waits = content.seq == seq and time.monotonic() < not_before_s
            if self._held is not None or stands or waits or not self._is_news(content):
                return False
        with self.mirror.kept_still():
            now = self.mirror.content()
            staged = None if now is None or now.seq != content.seq else self._stage(now)
        with self._lock:
            if staged is None or self._held is not None or not self._is_news(content):
                return False
            self._offer = staged
            self._ready.set()
        return True

    def _is_news(self, content: Content) -> bool:
        return self._confirmed is None or content.policy > self._confirmed.policy

    def _stage(self, content: Content) -> Staged:
        """With the mirror kept still."""
        return Staged(
            policy=content.policy,
            digest=content.digest,
            changed=self.mirror.changed_since(self._confirmed.seq if self._confirmed else 0, content.seq),
            fetched_bytes=content.path_bytes,
            path=content.path,
            published_ms=content.published_ms,
            seq=content.seq,
        )

    def _clear_offer(self) -> None:
        self._offer = None
        self._ready.clear()

    def _run_thread(self) -> None:
        while not self._stop.is_set():
            wait_s = self._poll_s
            try:
                self.poll_once()
                wait_s = min(wait_s, self.mirror.failures.pause_s() or wait_s)
            except AnabranchError as error:
                if isinstance(error, ConfigError) and self._confirmed is None:
                    self._fail(error)
                    return
                if str(error) != self._follow_error:
                    self._log.warning("weights not fetched; the old version goes on serving", error=str(error))
                self._follow_error, self._failed_at = str(error), self.mirror.progress[0]
                backoff = backoff_s(self._failures, base_s=RETRY_FIRST_S, cap_s=RETRY_LAST_S)
                wait_s, self._failures = self.mirror.failures.pause_s() or backoff, self._failures + 1
            except Exception as error:  # noqa: BLE001 - raised on the engine's thread, which must not serve one version for ever
                self._fail(error)
                return
            self._wake.wait(wait_s)
            self._wake.clear()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._fatal, self._end = error, FollowerState.FAILED
            self._follow_error = repr(error)
            self._ready.set()


def changed_elements(changed: Changed, mirror: NodeMirror) -> int:
    """How many elements a swap of `changed` writes."""
    return sum(mirror.layout.by_name[n].numel if i is None else int(i.size) for n, i in changed.items())
