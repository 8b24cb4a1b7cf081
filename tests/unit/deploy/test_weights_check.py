from __future__ import annotations

import pytest

from anabranch.deploy.weights_check import check_channel, check_producers
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import DeadlineError, DeltaError, TemporaryError, UsageError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_boards import MemoryRunBoard
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.signing import load_signer, write_key_pair
from tests.unit.deploy.weights_channels import Made, usual

CONFIG = load_config("[run]\nname = 'r'\n")


@pytest.fixture
def channel() -> MemoryWeightChannel:
    return MemoryWeightChannel(MemoryWeightStore("r"))


def break_chunk(channel: MemoryWeightChannel, policy: PolicyVersion, label: str) -> None:
    manifest = Manifest.from_json(channel._store.manifests[policy, label])
    channel._store.blobs.chunks[manifest.chunks[0].digest] = b"?"


def test_all_is_well(channel, capsys):
    made = usual(channel, "r")
    check_channel(channel, CONFIG)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("e1.v0 to e1.v8, e2.v5 to e2.v8: 20 manifests; ")
    assert line.endswith("intact; 20 decoded, each with the digest it names")
    check_channel(channel, CONFIG, first="7", last="head", chunks_only=True)
    assert capsys.readouterr().out.startswith("e2.v7 to e2.v8: 2 manifests; ")
    assert made.channel is channel


def test_all_that_is_broken_is_printed_and_the_first_is_the_error(channel, capsys):
    usual(channel, "r")
    break_chunk(channel, PolicyVersion(1, 8), "skip2")
    break_chunk(channel, PolicyVersion(2, 8), "delta")
    with pytest.raises(DeltaError, match=r"^e1.v8 skip2: chunk .* \(the first of 3 findings\)$") as error:
        check_channel(channel, CONFIG)
    assert error.value.exit_code == 76
    broken = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BROKEN: ")]
    assert [line.split()[1:3] for line in broken] == [["e1.v8", "skip2:"], ["e2.v8", "delta:"], ["without", "what"]]


def test_signatures_count_if_keys_are_trusted(channel, tmp_path, capsys):
    key = write_key_pair(tmp_path / "key.pem")
    signer = load_signer(tmp_path / "key.pem")
    made = Made(channel, "r", sign=signer.sign)
    made.begin()
    made.step(2)
    config = load_config(f"[run]\nname = 'r'\n[channel]\ntrusted_keys = ['{key}']\n")
    check_channel(channel, config)
    assert "all signed by a trusted key" in capsys.readouterr().out
    made.sign = lambda m: signer.sign(m).model_copy(update={"learner_step": 1000})  # altered after it was signed
    made.step()
    made.sign = lambda m: m
    made.anchor(PolicyVersion(1, 3))
    with pytest.raises(DeltaError, match=r"its signature by .* was altered"):
        check_channel(channel, config)
    assert "it is not signed" in capsys.readouterr().out


def test_nothing_there_and_nothing_in_the_range(channel):
    with pytest.raises(TemporaryError, match="nothing is published yet for run r"):
        check_channel(channel, CONFIG)
    usual(channel, "r")
    with pytest.raises(UsageError, match=r"nothing from e2.v9 to e2.v20 is on the channel, which holds e1.v0"):
        check_channel(channel, CONFIG, first="9", last="20")


def test_late_producers_are_a_temporary_error_and_wrong_ones_are_not(channel, capsys):
    usual(channel, "r")
    runs = MemoryRunBoard()
    status = ProducerStatus(updated_ms=0, region="eu", pid=1, state="", policy="e2.v8")
    runs.report_producer("a", status)
    with pytest.raises(DeadlineError, match="waiting for a to verify the live weights"):
        check_producers(channel, runs, deadline_s=0.05)
    request, runs.request_verification = runs.request_verification, lambda: "told"
    answer = {"verified_token": "told", "verified_policy": "e2.v8", "verified_digest": "0" * 32}
    runs.report_producer("a", status.model_copy(update=answer))
    with pytest.raises(DeltaError, match="a: its engine's weights have digest 0000"):
        check_producers(channel, runs, deadline_s=0.05)
    assert "WRONG" in capsys.readouterr().out
    assert request
