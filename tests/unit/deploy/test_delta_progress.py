"""A bar where somebody watches, silence elsewhere."""

from __future__ import annotations

import os
import pty
import sys
import time

import pytest

from anabranch.deploy.delta_progress import progress


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", 100) as advance:
        advance(100)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress("reading OLD", 4_000_000) as advance:
            for _ in range(3):
                advance(1_000_000)
                time.sleep(0.15)
        shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "reading OLD" in shown
    assert "/4.0 MB" in shown
    assert "0:00:0" in shown
