from __future__ import annotations

import pytest

from anabranch.deploy.weights_pins import pin, unpin
from anabranch.schemas.errors import UsageError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.unit.deploy.weights_channels import usual


@pytest.fixture
def channel() -> MemoryWeightChannel:
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    usual(channel, "r")
    return channel


def test_pinned_until_unpinned(channel):
    assert "pinned e1.v3" in pin(channel, "r", "e1.v3", "best so far")
    pin(channel, "r", "head", "")
    assert channel.pins() == {PolicyVersion(1, 3): "best so far", PolicyVersion(2, 8): ""}
    pin(channel, "r", "e1.v3", "still")
    assert channel.pins()[PolicyVersion(1, 3)] == "still"
    assert "unpinned e1.v3" in unpin(channel, "r", "e1.v3")
    with pytest.raises(UsageError, match=r"e1.v3 is not pinned; pinned: e2.v8"):
        unpin(channel, "r", "e1.v3")


def test_only_what_is_there_and_only_a_note_of_one_line(channel):
    with pytest.raises(UsageError, match=r"e1.v30 is not on the channel"):
        pin(channel, "r", "e1.v30", "")
    for note in ("x" * 201, "two\nlines", "\x1b[31m"):
        with pytest.raises(UsageError, match="a note is one line"):
            pin(channel, "r", "head", note)
    assert channel.pins() == {}
