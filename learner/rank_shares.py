"""What the ranks have left of a version on the channel, as rank 0 reads it: each rank's record of its share.

Invariant: the wait for them has a deadline and names the ranks that are missing; a rank that says that it has failed ends it at
once. Held by tests/unit/learner/test_commits.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from anabranch.learner.share_record import ShareRecord, read_record
from anabranch.schemas.errors import ConfigError, DeadlineError, TemporaryError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.retry import retry_until
from anabranch.transport.signing import Signer
from anabranch.transport.weight_channel import WeightChannel

POLL_S = 0.01
PATIENCE = 2  # times connect_deadline_s, for the shares of other ranks: they retry for one of it themselves


class RankShares:
    """Lives in rank 0's publishing thread, which owns `channel`."""

    def __init__(
        self,
        channel: WeightChannel,
        *,
        world_size: int,
        deadline_s: float,
        signer: Signer | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self._channel, self._world_size, self._deadline_s = channel, world_size, deadline_s
        self._signer, self._should_stop = signer, should_stop

    def complete(self, own: ShareRecord) -> list[ShareRecord]:
        """The records of all ranks. Raises DeadlineError naming the ranks that are missing; ConfigError or TemporaryError
        when one says that it has failed."""
        deadline_s = PATIENCE * self._deadline_s
        started_s = time.monotonic()
        while True:
            records = retry_until(
                lambda: self.present(own), deadline_s=self._deadline_s, should_stop=self._should_stop,
                what=f"the hub's Redis, to read the shares of version {own.version}",
            )  # fmt: skip
            if (failed := next((r for r in records if r.declined), None)) is not None:
                raise (ConfigError if failed.lasting else TemporaryError)(
                    f"rank {failed.rank} of the learner cannot store its share of {own.label} {own.policy}: "
                    f"{failed.declined}"
                )
            if len(records) == self._world_size:
                return records
            waited_s = time.monotonic() - started_s
            if waited_s > deadline_s or self._should_stop():
                raise DeadlineError.waiting_for(
                    f"{self.missing(records)} of the learner to store the share of {own.label} {own.policy}",
                    deadline_s,
                    "see the log of that rank",
                )
            time.sleep(poll_s(POLL_S, waited_s))

    def present(self, own: ShareRecord) -> list[ShareRecord]:
        """What is there so far, by rank. Raises ManifestError, and TemporaryError if the hub does not answer."""
        if self._world_size == 1:
            return [own]
        texts = self._channel.shares(own.policy, own.label)
        others = [
            read_record(texts[rank], run=own.run, policy=own.policy, label=own.label, rank=rank, signer=self._signer)
            for rank in range(1, self._world_size)
            if rank in texts
        ]
        return [own, *others]

    def missing(self, records: list[ShareRecord]) -> str:
        """The ranks of which there is none, in words."""
        absent = sorted(set(range(self._world_size)) - {r.rank for r in records})
        return ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))

    def drop(self, policy: PolicyVersion, label: str) -> None:
        """They are not wanted any more."""
        if self._world_size > 1:
            with contextlib.suppress(TemporaryError):  # else they expire after some minutes
                self._channel.drop_shares(policy, label)


def poll_s(least_s: float, waited_s: float) -> float:
    """Records may have megabytes: whoever has waited long looks less often."""
    return min(2.0, max(least_s, waited_s / 20))
