"""Ranks end together, and their launcher with them."""

from __future__ import annotations

import sys
import time

import pytest

from anabranch.learner.launch import launch_ranks

RANK_0 = "import os, sys, time; rank = os.environ['RANK']; "


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("rank == '0' or time.sleep(60)", 0),  # rank 0 is done, rank 1 hangs
        ("sys.exit(75) if rank == '0' else time.sleep(60)", 75),
        ("sys.exit(78) if rank == '1' else time.sleep(60)", 78),
    ],
)
def test_no_rank_is_waited_for_without_end(program: str, code: int) -> None:
    began = time.monotonic()
    assert launch_ranks(2, [sys.executable, "-I", "-S", "-c", RANK_0 + program], grace_s=0.2) == code
    assert time.monotonic() - began < 20
