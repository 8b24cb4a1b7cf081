"""Appending for tests that care for what arrives, not for a producer's bookkeeping."""

from __future__ import annotations

from anabranch.schemas.envelope import Envelope
from anabranch.transport.stream import TrajectoryStream


def put(stream: TrajectoryStream, *envelopes: Envelope) -> int:
    """Append each by itself, with gaps wherever there are some; how many were new."""
    new = 0
    for envelope in envelopes:
        expected = stream.progress(envelope.producer).next_seq or 0
        new += envelope.seq >= expected
        assert stream.append([envelope], floor=envelope.seq) == envelope.seq + 1
    return new
