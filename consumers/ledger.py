"""The ledger of a run: produced = trained + dropped(cause) + pending, per region.

Invariant: the three sides are counted by different acts (append, settle, and the stream's own pending and undelivered
entries), so the equation is a check and not a definition. Held by tests/contract/test_stream.py.
"""

from __future__ import annotations

import json

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


def render_ledger(ledger: dict[str, LedgerCounts], *, as_json: bool) -> str:
    """The ledger as one JSON object, or as a table for people."""
    if as_json:
        return json.dumps(
            {
                name: {"produced": c.produced, "pending": c.pending, "balanced": c.balanced, **c.fates}
                for name, c in ledger.items()
            }
        )
    rows = [("region", "groups", "")]
    for name, c in ledger.items():
        rows.append((name, f"{c.produced:,}", "produced"))
        rows += [
            ("", f"{n:,}", f"= {fate}" if i == 0 else f"+ {fate}")
            for i, (fate, n) in enumerate(sorted(c.fates.items()))
        ]
        rows.append(("", f"{c.pending:,}", "+ pending" + ("" if c.balanced else "   DOES NOT BALANCE")))
    return "\n".join(f"{a:<12} {b:>10}  {c}".rstrip() for a, b, c in rows)
