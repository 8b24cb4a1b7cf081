"""The ledger of a run: produced + foreign = trained + dropped(cause) + pending, per region.

Invariant: the sides are counted by different acts (append, settle, and the stream's own pending and undelivered
entries), so the equation is a check and not a definition. Held by tests/contract/test_stream.py.
"""

from __future__ import annotations

from anabranch.schemas.config import RunConfig
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.stream import LedgerCounts
from anabranch.transport.wiring import connect_region


def read_ledger(config: RunConfig) -> dict[str, LedgerCounts]:
    """Region -> counts of groups. Raises StreamUnavailableError naming the region that cannot be reached."""
    counts: dict[str, LedgerCounts] = {}
    for name in sorted(config.regions):
        stream = connect_region(config, name)
        try:
            counts[name] = stream.ledger(LEARNER_GROUP)
        finally:
            stream.close()
    return counts
