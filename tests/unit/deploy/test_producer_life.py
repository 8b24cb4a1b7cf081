"""Who was heard of lately is not forgotten without a word."""

from __future__ import annotations

import pytest

from anabranch.deploy.producer_life import HEARD_WITHIN_MS, Heard, refuse_living, signs_of_life
from anabranch.schemas.errors import TemporaryError
from anabranch.transport.stream import ProducerProgress

SILENT = ProducerProgress(7, None, idle_ms=HEARD_WITHIN_MS)


def test_a_producer_that_nobody_heard_of_gives_no_sign() -> None:
    assert signs_of_life({"east": SILENT, "west": ProducerProgress(None, None)}, Heard()) == []
    assert signs_of_life({"east": ProducerProgress(7, None)}, Heard()) == [], (
        "a stream of an older release does not know"
    )
    refuse_living("p", {"east": SILENT}, Heard())


@pytest.mark.parametrize(
    ("idle_ms", "heard", "sign"),
    [
        (59_000, Heard(), "it appended to region east 59 s ago"),
        (60_000, Heard(state="sampling"), "it reported to the hub within the last minute (sampling)"),
        (60_000, Heard(leases=3), "it holds the leases of 3 groups"),
        (
            60_000,
            Heard(unknown="no answer from the hub"),
            "whether it reports and holds leases is not known: no answer from the hub",
        ),
    ],
)
def test_each_sign_is_named(idle_ms: int, heard: Heard, sign: str) -> None:
    progress = {"east": ProducerProgress(7, None, idle_ms=idle_ms)}
    assert signs_of_life(progress, heard) == [sign]
    with pytest.raises(TemporaryError) as caught:
        refuse_living("p\x1b", progress, heard)
    assert sign in str(caught.value)
    assert "--force" in str(caught.value)
    assert "\x1b" not in str(caught.value)
