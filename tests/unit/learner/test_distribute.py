import os
from typing import Any, cast

import pytest

from anabranch.learner.collective import CollectiveEngine
from anabranch.learner.distribute import broadcast_bytes, init_ranks, rank_from_environment
from anabranch.schemas.errors import ConfigError


@pytest.mark.parametrize(("rank", "world_size", "placed"), [(None, None, None), ("1", "2", (1, 2)), ("0", "1", (0, 1))])
def test_a_launcher_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch, rank, world_size, placed):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert rank_from_environment() == placed


@pytest.mark.parametrize(("rank", "world_size"), [("1", None), (None, "2"), ("one", "2")])
def test_half_a_placement_is_refused(monkeypatch: pytest.MonkeyPatch, rank, world_size):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"RANK={rank} and WORLD_SIZE={world_size}"):
        rank_from_environment()


def test_one_rank_needs_no_network_and_cannot_become_two():
    init_ranks(0, 1, device="cpu", deadline_s=10)
    assert broadcast_bytes(b"") == b""
    assert broadcast_bytes(b"\x00\xff" * 1000) == b"\x00\xff" * 1000
    init_ranks(0, 1, device="cpu", deadline_s=10)
    with pytest.raises(ConfigError, match="rank 0 of 1, not 1 of 2"):
        init_ranks(1, 2, device="cpu", deadline_s=10)


def test_a_rank_that_is_gone_does_not_hide_why_rank_0_ends(monkeypatch: pytest.MonkeyPatch):
    def gone(_: bytes) -> bytes:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("anabranch.learner.collective.broadcast_bytes", gone)
    CollectiveEngine(cast(Any, None), world_size=2).stop()


def test_a_process_group_that_is_there_already_still_gets_what_deepspeed_reads(monkeypatch):
    """vLLM may have made the group in this process, without LOCAL_RANK."""
    init_ranks(0, 1, device="cpu", deadline_s=10)
    monkeypatch.delenv("LOCAL_RANK")
    init_ranks(0, 1, device="cpu", deadline_s=10)
    assert os.environ["LOCAL_RANK"] == "0"


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_ranks_that_nobody_told_where_to_meet_are_refused(monkeypatch: pytest.MonkeyPatch, missing: str):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    for name in {"MASTER_ADDR", "MASTER_PORT"} - {missing}:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(missing, raising=False)
    with pytest.raises(ConfigError, match=f"rank 1 of 2 does not know where the ranks meet: {missing} not set"):
        init_ranks(1, 2, device="cpu", deadline_s=10)
