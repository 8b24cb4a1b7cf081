"""`anabranch weights pin` and `unpin`: a version that retention leaves alone until somebody says otherwise.

Invariant: only a version that is on the channel is pinned. Held by tests/unit/deploy/test_weights_pins.py.
"""

from __future__ import annotations

from anabranch.deploy.weights_versions import find_version, parse_version, published_head, spans
from anabranch.schemas.errors import UsageError
from anabranch.transport.weight_channel import WeightChannel

MAX_NOTE = 200


def pin(channel: WeightChannel, run: str, name: str, note: str) -> str:
    """Pin the version that `name` names; pinned again it takes the new note. Returns what was done, in words.

    Raises:
        UsageError: no such version, or a note that is longer than `MAX_NOTE` or has line breaks.
        TemporaryError: nothing is published yet.
    """
    if len(note) > MAX_NOTE or not note.isprintable():
        raise UsageError(f"a note is one line of at most {MAX_NOTE} characters")
    version = find_version(name, channel.index(), published_head(channel, run))
    channel.pin(version.policy, note)
    return f"pinned {version.policy}: it and a way to it stay until it is unpinned"


def unpin(channel: WeightChannel, run: str, name: str) -> str:
    """Raises UsageError if that version is not pinned, TemporaryError if nothing is published yet."""
    policy = parse_version(name, published_head(channel, run))
    if not channel.unpin(policy):
        raise UsageError(f"{policy} is not pinned; pinned: {spans(channel.pins())}")
    return f"unpinned {policy}: retention may take it"
