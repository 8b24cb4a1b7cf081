"""A follower's part in its node's turn: it fetches for all, or sees whoever does get on, or keeps the pause after a failure.

Invariant: nothing is fetched without the turn, nor before the node's pause has passed; a failure with the turn is left to the
node before the turn is. Waiting for a process that gets nowhere ends with an error that names it. Held by
tests/unit/producers/test_weight_follower.py.
"""

from __future__ import annotations

import enum
import threading
import time

from anabranch.producers.node_mirror import NodeMirror
from anabranch.producers.weight_advance import Advancer, News
from anabranch.schemas.errors import AnabranchError, DeadlineError
from anabranch.schemas.versions import PolicyVersion

TURN_DEADLINE_S = 60.0  # without any progress, of the process that fetches for this node


class FollowerState(enum.Enum):
    POLLING = "polling"
    FETCHING = "fetching"
    WAITING = "waiting for another producer of this node to fetch"
    FAILED = "failed"  # for good: the producer must exit
    CLOSED = "closed"


class NodeTurn:
    def __init__(self, mirror: NodeMirror, advancer: Advancer, stop: threading.Event) -> None:
        """`stop`: this producer ends; what fails then concerns nobody else."""
        self._mirror, self._advancer, self._stop = mirror, advancer, stop
        self._seen: tuple[tuple[int, int], float] = ((0, 0), 0.0)  # progress, and since when
        self.state = FollowerState.POLLING

    def take(self, head: PolicyVersion, news: News | None) -> bool:
        """Take the mirror to `head`; False: not now, a neighbour has the turn or the node pauses.

        Raises:
            DeadlineError: the neighbour that has the turn gets nowhere.
            Whatever `Advancer.advance_to` raises.
        """
        failures = self._mirror.failures
        if failures.pause_s():
            self.state = FollowerState.POLLING
            return False
        if not self._mirror.try_turn():
            self._watch()
            return False
        try:
            if failures.pause_s():  # a neighbour has failed just now
                return False
            self.state = FollowerState.FETCHING
            self._advancer.advance_to(head, news)
            failures.worked()
        except AnabranchError as error:
            if not self._stop.is_set():
                failures.failed(error)
            raise
        finally:
            self._mirror.end_turn()
            self.state = FollowerState.POLLING
        return True

    def _watch(self) -> None:
        progress, since = self._mirror.progress, time.monotonic()
        if self.state is FollowerState.WAITING and self._seen[0] == progress:
            since = self._seen[1]
        self.state, self._seen = FollowerState.WAITING, (progress, since)
        if time.monotonic() - since > TURN_DEADLINE_S:
            raise DeadlineError.waiting_for(
                f"{self._mirror.turn_holder()} to fetch the weights for this node",
                TURN_DEADLINE_S,
                "if it is stopped, kill it",
            )
