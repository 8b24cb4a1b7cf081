"""A slow link for tests: two network namespaces and what lies beside the checkout in shared/ between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.deploy.slow_link import SlowLink, why_not

PROGRAM = Path(__file__).resolve().parent.parent.parent / "shared" / "tunlink.py"


def slow_link(*, rtt_ms: float = 150.0, rate_mbit: float = 100.0, seconds: float = 110.0) -> SlowLink:
    """A link to enter; skips the test, with the reason, where this machine cannot make one."""
    if lacking := why_not(PROGRAM):
        pytest.skip(f"no slow link: {lacking}")
    return SlowLink(PROGRAM, rtt_ms=rtt_ms, rate_mbit=rate_mbit, seconds=seconds)
