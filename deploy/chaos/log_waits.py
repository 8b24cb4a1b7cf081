"""How long a producer could not append, by its own log: one that is cut off from the hub too has no status that anybody sees.

Invariant: never too short: a wait counts from the first failure to the stream's return, whatever was finished meanwhile, and one
that has no return to the producer's next start or the log's end. By the producer's clock, which must not have been stepped.
Held by tests/unit/deploy/chaos/test_log_waits.py.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from anabranch.deploy.chaos.waits import Wait

_AWAY, _BACK, _START = "cannot append; groups wait in the spool", "region stream is back", "producer begins"


def append_waits(log: Path, region: str) -> list[Wait]:
    """Of the producer of `region`, under the name that its status has for it; a log that is not there has none."""
    found: list[float] = []
    since: datetime | None = None
    last: datetime | None = None
    for event, at in _lines(log):
        last = at
        if event == _AWAY and since is None:
            since = at
        elif event in (_BACK, _START) and since is not None:
            found.append((at - since).total_seconds())
            since = None
    if since is not None and last is not None:
        found.append((last - since).total_seconds())
    return [Wait(region, f"region {region}: N groups to append", seconds) for seconds in found]


def _lines(log: Path) -> list[tuple[str, datetime]]:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
            found.append((str(record["event"]), datetime.fromisoformat(record["timestamp"])))
        except (ValueError, KeyError, TypeError):
            continue  # what libraries print, and a line cut short
    return found
