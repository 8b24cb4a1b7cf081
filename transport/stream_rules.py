"""What every trajectory stream asks of its callers, whatever keeps it: checked before anything is sent or stored.

Invariant: an append is of one producer, consecutive and within the size limit; a fate is one that the ledger can count; an
id is one that the server can read. Held by tests/contract/test_stream_append.py and tests/contract/test_dead_letters.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anabranch.schemas.envelope import MAX_SEQ, Envelope, is_producer
from anabranch.schemas.errors import EnvelopeError, UsageError
from anabranch.schemas.keys import LEARNER_GROUP

TRAINED = "trained"
DROPPED = "dropped:"
_ID = re.compile(r"[0-9]{1,18}-[0-9]{1,18}\Z")


def check_append(envelopes: Sequence[Envelope], floor: int, max_entry_bytes: int) -> None:
    """Raises EnvelopeError: see `TrajectoryStream.append`."""
    for expected, envelope in enumerate(envelopes, envelopes[0].seq):
        name = f"entry {envelope.producer}/{envelope.seq}"
        if len(envelope.payload) > max_entry_bytes:
            raise EnvelopeError(
                f"{name} holds {len(envelope.payload)} bytes; stream.max_entry_bytes is {max_entry_bytes}"
            )
        if envelope.producer != envelopes[0].producer or envelope.seq != expected:
            raise EnvelopeError(f"{name} follows {envelopes[0].producer}/{expected - 1}: appended ones are consecutive")
        if not 0 <= envelope.seq <= MAX_SEQ or not is_producer(envelope.producer):
            raise EnvelopeError(f"{name}: a producer is 1 to 200 visible ASCII characters, its numbers 0 to {MAX_SEQ}")
    if not 0 <= floor <= envelopes[0].seq:
        raise EnvelopeError(
            f"entry {envelopes[0].producer}/{envelopes[0].seq} is below {floor}, the lowest its producer holds"
        )


def counted_fate(group: str, fate: str) -> str:
    """The fate as the ledger counts it: the learner's group alone is counted, others have "".

    Raises UsageError: the learner's is neither "trained" nor "dropped:CAUSE".
    """
    if group != LEARNER_GROUP:
        return ""
    if fate != TRAINED and not (fate.startswith(DROPPED) and len(fate) > len(DROPPED)):
        raise UsageError(f"{fate!r} is no fate of a group: trained or dropped:CAUSE")
    return fate


def parse_id(entry_id: str) -> tuple[int, int]:
    """Raises UsageError unless it is MS-SEQ."""
    if not _ID.match(entry_id):
        raise UsageError(f"{entry_id!r} is not the id of an entry, such as 1718000000000-0")
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq)
