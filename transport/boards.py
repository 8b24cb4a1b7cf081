"""Small boards on the hub where processes leave each other word: is the run over, who does what, what to evaluate.

Invariant: a board is never waited on by the side that writes. A run is finished once and stays so until a learner
starts it again; an evaluation shard has one holder at a time and one result, and a dead holder's shard goes to
another when its lease expires (one that ends later than twice the lease asked for was written before the hub's clock stepped
back: it counts as expired). A request to verify ends by itself. Held by tests/contract/test_boards.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from anabranch.schemas.metrics import LearnerStatus, ProducerStatus
from anabranch.schemas.versions import PolicyVersion

STALE_AFTER_MS = 30_000
VERIFY_WITHIN_MS = 600_000  # a producer that starts later has nothing to verify


class RunBoard(Protocol):
    """All methods raise StreamUnavailableError when the hub cannot be reached. Times are the hub's clock."""

    def start(self) -> None:
        """Learner: the run goes on; takes back an earlier `finish`."""
        ...

    def finish(self, reason: str) -> None:
        """Learner: producers and recorder are to end. The first reason stays."""
        ...

    def finished(self) -> str | None:
        """The reason, or None while the run goes on."""
        ...

    def report_learner(self, status: LearnerStatus) -> None: ...

    def learner(self) -> LearnerStatus | None: ...

    def report_producer(self, producer: str, status: ProducerStatus) -> None: ...

    def producers(self, *, within_ms: int = STALE_AFTER_MS) -> dict[str, ProducerStatus]:
        """Those that have reported within the last `within_ms`."""
        ...

    def drop_stale_producers(self, *, older_ms: int = STALE_AFTER_MS) -> list[str]:
        """Forget the producers that have not reported for `older_ms`; returns their ids, sorted."""
        ...

    def request_verification(self, *, ttl_ms: int = VERIFY_WITHIN_MS) -> str:
        """Ask every producer to compute the digest of the weights that its engine serves. Returns the request's token,
        which a producer's status answers with `verified_token`; a later request replaces this one."""
        ...

    def verification_wanted(self) -> str | None:
        """The token of the request that stands, None if there is none or its time is over."""
        ...


class EvaluationBoard(Protocol):
    """All methods raise StreamUnavailableError when the hub cannot be reached. Times are the hub's clock."""

    def request(self, policy: PolicyVersion, shards: int) -> None:
        """Learner: evaluate `policy` in `shards` parts. Results posted before for the same policy stay."""
        ...

    def wanted(self) -> tuple[PolicyVersion, int] | None: ...

    def take(self, producer: str, policy: PolicyVersion, lease_ms: int) -> int | None:
        """Lowest shard of `policy` without result or living lease, leased to `producer`; None if there is none or
        `policy` is not wanted."""
        ...

    def renew(self, producer: str, policy: PolicyVersion, shard: int, lease_ms: int) -> bool:
        """Extend the lease of a shard that `producer` took. False if it is not its own any more, or has a result."""
        ...

    def post(self, policy: PolicyVersion, shard: int, result: Mapping[str, Any]) -> bool:
        """Leave a shard's result (plain JSON). False, and nothing stored, if it has one or `policy` is not wanted."""
        ...

    def results(self, policy: PolicyVersion) -> dict[int, dict[str, Any]]: ...

    def clear(self) -> None:
        """Learner: nothing is wanted any more; the results of what was wanted go too."""
        ...
