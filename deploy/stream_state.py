"""`anabranch stream`: what a region's stream holds and who holds it up; forgetting readers and producers that are gone.

Invariant: what is shown is what the stream says; the learner's group is never forgotten, and no producer that has open entries.
Held by tests/unit/deploy/test_stream_state.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from anabranch.deploy.plain_text import plain
from anabranch.deploy.weights_versions import age_text
from anabranch.schemas.errors import TemporaryError, UsageError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.stream import GroupLag, StreamState, TrajectoryStream

GONE_AFTER_S = 600.0  # a reader asks several times a second; a learner at work on a long step still within minutes


def held_up_by(group: GroupLag) -> str:
    """Why entries stay because of this group; "" if nothing is wrong with it."""
    waiting = group.undelivered + group.pending
    if waiting == 0 or (group.idle_ms is not None and group.idle_ms < GONE_AFTER_S * 1000):
        return ""
    since = (
        "no consumer of it has ever read"
        if group.idle_ms is None
        else f"it last read {age_text(group.idle_ms / 1000)} ago"
    )
    name = plain(group.name, 60)
    if group.name == LEARNER_GROUP:
        return f"{waiting:,} entries wait for the learner, and {since}: is it running?"
    return (
        f"group {name} holds {waiting:,} entries, which are not trimmed, and {since}: start it, or if it is gone for "
        f"good: anabranch stream forget-group {name}"
    )


HEADING = f"{'region':<12} {'entries':>9} {'bytes':>15}  {'group':<14} {'not read':>9} {'pending':>9} {'last read':>10}"


def render(states: Mapping[str, StreamState]) -> str:
    lines, warnings = [HEADING], []
    for region, state in states.items():
        head = f"{region:<12} {state.entries:>9,} {state.bytes_used:>15,}"
        if not state.groups:
            lines.append(f"{head}  nobody has read yet")
        for group in state.groups:
            last = "-" if group.idle_ms is None else age_text(group.idle_ms / 1000)
            lines.append(f"{head}  {plain(group.name, 14):<14} {group.undelivered:>9,} {group.pending:>9,} {last:>10}")
            head = " " * len(head)
            if warning := held_up_by(group):
                warnings.append(f"{region}: {warning}")
    return "\n".join([*lines, *([""] if warnings else []), *warnings])


def as_json(states: Mapping[str, StreamState]) -> str:
    return json.dumps(
        {
            region: {
                "entries": state.entries,
                "bytes": state.bytes_used,
                "groups": [asdict(group) | {"holds_up": held_up_by(group) or None} for group in state.groups],
            }
            for region, state in states.items()
        },
        indent=2,
    )


def refuse_learner(group: str) -> None:
    """Raises UsageError: without the learner's group nothing of the ledger would hold."""
    if group == LEARNER_GROUP:
        raise UsageError("group learner is the learner's: it is never forgotten")


def lag_of(stream: TrajectoryStream, group: str) -> GroupLag | None:
    return next((lag for lag in stream.state().groups if lag.name == group), None)


def forget_producer(stream: TrajectoryStream, producer: str) -> bool:
    """False if the stream knows nothing of it. Raises TemporaryError while the learner has not settled all of its entries."""
    progress = stream.progress(producer)
    if progress.next_seq is None:
        return False
    if not stream.forget_producer(producer):
        raise TemporaryError(
            f"producer {plain(producer, 60)} has entries that the learner has not settled, from sequence number "
            f"{progress.lowest_open} on: try again when it has"
        )
    return True
