"""`anabranch` without a process of its own, for tests that say many commands: half a second of imports is saved each time.

What a process adds (signals, closed outputs, exit at a deadline) is tested with real ones, in tests/test_cli_surface.py too.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess

import pytest

from anabranch.cli.main import main


def anabranch(*argv: str) -> subprocess.CompletedProcess[str]:
    """What it said and its exit code; its input is empty."""
    out, err = io.StringIO(), io.StringIO()
    with (
        open(os.devnull) as nothing,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr("sys.stdin", nothing)
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())
