"""Replies of a Redis that may be anybody's (a region's replica), checked for their shape before they are used.

Invariant: whatever the server answers in place of a head, an index or manifests is a ManifestError, never an error of
another kind: a follower reports it and serves on. Held by tests/contract/test_tampering.py.
"""

from __future__ import annotations

import json

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.versions import PolicyVersion

MAX_HEAD_BYTES = 200
_EPOCHS, _VERSIONS = 2**21, 2**32  # as in schemas.manifest


def text_of(reply: object, what: str) -> bytes | None:
    """A string, or None for a key that is not there. Raises ManifestError."""
    if reply is None or isinstance(reply, bytes):
        return reply
    raise ManifestError(f"{what}: the server answered with {type(reply).__name__} in place of a string")


def texts_of(reply: object, what: str, count: int | None = None) -> list[bytes | None]:
    """A list of strings (None: not there), `count` of them if that is known. Raises ManifestError."""
    if not isinstance(reply, list) or (count is not None and len(reply) != count):
        raise ManifestError(
            f"{what}: the server did not answer with a list of {'' if count is None else count} strings"
        )
    return [text_of(one, what) for one in reply]


def head_of(text: bytes | None, run: str) -> PolicyVersion | None:
    """What the head names. Raises ManifestError unless it is {"epoch": E, "version": V} within the bounds of a
    manifest."""
    if text is None:
        return None
    try:
        if len(text) > MAX_HEAD_BYTES:  # before it is parsed: deep nesting ends the parser, not in a ValueError
            raise ValueError(f"{len(text)} bytes")
        found = json.loads(text)
        epoch, version = found["epoch"], found["version"]
        if type(epoch) is not int or type(version) is not int:
            raise ValueError("epoch and version are not whole numbers")
        if not (0 <= epoch < _EPOCHS and 0 <= version < _VERSIONS):
            raise ValueError("epoch or version out of range")
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"the head of run {run!r} is not readable: {error}") from error
    return PolicyVersion(epoch, version)
