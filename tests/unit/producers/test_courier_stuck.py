"""An entry that cannot be sent is told from a region that cannot be reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.schemas.errors import StreamUnavailableError
from tests.spools import fill
from tests.unit.producers.courier_lab import Lab


def test_an_entry_that_fails_alone_while_the_region_answers_is_named_ever_more_rarely(tmp_path: Path) -> None:
    """Such as one that takes longer to send than the socket time-out: it would be tried for ever without a word."""
    lab = Lab(tmp_path)
    fill(lab.spool, 3)
    lab.stream.plan = ["away"] * 20
    with capture_logs() as logs:
        for tries in range(18):
            with pytest.raises(StreamUnavailableError) as caught:
                lab.turn(1.0)
            lab.courier.interrupt(away=True)
            assert ("entry east-00-abc123/1 of 20 bytes" in str(caught.value)) == (tries >= 2), "the first were three"
    told = [(log["seq"], log["bytes"], log["tries"]) for log in logs if log["log_level"] == "error"]
    assert told == [(1, 20, 2), (1, 20, 4), (1, 20, 8), (1, 20, 16)]
    lab.stream.plan = []
    lab.drain()
    assert lab.numbers() == [1, 2, 3]
    lab.stream.plan = ["away"]
    fill(lab.spool, 1)
    with pytest.raises(StreamUnavailableError, match=r"^the region cannot be reached$"):
        lab.drain()


def test_a_region_that_is_away_is_not_the_fault_of_an_entry(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 1)
    for _ in range(5):
        lab.stream.down = True
        with pytest.raises(StreamUnavailableError, match=r"^the region cannot be reached$"):
            lab.turn()
        lab.courier.interrupt(away=True)
