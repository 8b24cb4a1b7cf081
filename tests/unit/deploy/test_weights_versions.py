from __future__ import annotations

import pytest

from anabranch.deploy.weights_versions import age_text, find_version, parse_version, published_head, spans, versions_of
from anabranch.schemas.errors import TemporaryError, UsageError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.unit.deploy.weights_channels import usual

HEAD = PolicyVersion(2, 8)


@pytest.mark.parametrize(
    ("text", "means"),
    [("head", HEAD), ("e1.v42", PolicyVersion(1, 42)), ("42", PolicyVersion(2, 42)), ("0", PolicyVersion(2, 0))],
)
def test_names_of_versions(text, means):
    assert parse_version(text, HEAD) == means


@pytest.mark.parametrize("text", ["", "v42", "e1", "e1.v", "-1", "１", "HEAD", "nothing", "e1.v4 ", "9" * 40])
def test_anything_else_is_a_usage_error_that_shows_the_forms(text):
    with pytest.raises(UsageError, match=r"names no version: e1.v42, 42 \(of the head's epoch\) or head"):
        parse_version(text, HEAD)


def test_what_is_not_there_is_told_with_what_is():
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    with pytest.raises(TemporaryError, match="nothing is published yet for run r"):
        published_head(channel, "r")
    usual(channel, "r")
    head = published_head(channel, "r")
    with pytest.raises(UsageError, match=r"e2.v9 is not on the channel, which holds e1.v0 to e1.v8, e2.v5 to e2.v8"):
        find_version("9", channel.index(), head)
    assert find_version("e1.v6", channel.index(), head).labels == ("delta", "anchor", "skip2")
    assert find_version("5", channel.index(), head).labels == ("fork",)


def test_versions_in_order_with_what_made_them_first():
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    made = usual(channel, "r")
    versions = versions_of(reversed(channel.index()))
    assert [v.policy for v in versions] == sorted(made.states)
    eight = versions[8]
    assert eight.labels == ("delta", "skip2", "skip4")
    assert eight.step_bytes == eight.entries[0].payload_bytes < eight.stored_bytes
    assert versions[0].labels == ("anchor",)


def test_spans_and_ages():
    assert spans([]) == "nothing"
    assert spans([PolicyVersion(1, 3), PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(2, 3)]) == (
        "e1.v1 to e1.v3, e2.v3"
    )
    assert [age_text(s) for s in (-3, 12, 300, 10_000, 400_000)] == ["0 s", "12 s", "5 min", "2.8 h", "4.6 d"]
