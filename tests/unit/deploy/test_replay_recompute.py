"""Log-probs under a published version are those of that version's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anabranch.consumers.run_reader import RunReader
from anabranch.deploy import replay_recompute
from anabranch.deploy.replay_recompute import Recomputed, compute, exported, folder_digest, image_of, policies_of
from anabranch.learner.policy import load_model
from anabranch.learner.weights import PublishedWeights
from anabranch.schemas.errors import ManifestError, UsageError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.version_record import VersionRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.replay_runs import write_run
from tests.tiny import build_checkpoint
from tests.weights import Publisher

ROW = {"id": "east/p/1/0", "prompt_token_ids": [65, 66, 67], "token_ids": [70, 71, 72, 258], "tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("recompute") / "model")


@pytest.fixture(scope="module")
def published(model: Path) -> Publisher:
    """e1.v0 the checkpoint's own weights, e1.v1 others."""
    weights = PublishedWeights(load_model(model, torch.bfloat16))
    publisher = Publisher(MemoryWeightChannel(MemoryWeightStore("r")), weights.layout)
    publisher.open(state=weights.bits())
    publisher.step(density=0.5)
    return publisher


def accept(manifest: Manifest) -> None:
    pass


def reference(folder: Path, temperature: float) -> list[float]:
    """By the model's own logits."""
    model = load_model(folder, torch.float32)
    ids = torch.tensor([[*ROW["prompt_token_ids"], *ROW["token_ids"]]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, 2:-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, 3:, None]).squeeze(1).tolist()


def test_logprobs_are_those_of_the_models_own_logits(model: Path) -> None:
    assert compute(model, ROW, temperature=0.7) == pytest.approx(reference(model, 0.7), abs=1e-5)


def test_a_version_is_decoded_from_the_channel_and_checked(model: Path, published: Publisher) -> None:
    first, second = published.states
    policy, image = image_of(published.channel, "r", "e1.v0", check=accept, threads=1)
    assert (policy, image.digest) == (first, folder_digest(model, threads=1))
    with exported(image, model) as folder:
        assert compute(folder, ROW, temperature=1.0) == compute(model, ROW, temperature=1.0)
    policy, image = image_of(published.channel, "r", "head", check=accept, threads=1)
    assert policy == second
    with exported(image, model) as folder:
        changed = compute(folder, ROW, temperature=1.0)
        assert changed == pytest.approx(reference(folder, 1.0), abs=1e-5)
    assert changed != pytest.approx(compute(model, ROW, temperature=1.0), abs=1e-5)
    assert not folder.exists()


def test_what_is_not_on_the_channel_or_not_trusted_is_refused(published: Publisher) -> None:
    with pytest.raises(UsageError, match="not on the channel"):
        image_of(published.channel, "r", "e1.v99", check=accept, threads=1)

    def refuse(manifest: Manifest) -> None:
        raise ManifestError("nobody we trust")

    with pytest.raises(ManifestError, match="trust"):
        image_of(published.channel, "r", "head", check=refuse, threads=1)


def test_a_folder_is_named_by_its_digest(model: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    digest = folder_digest(model, threads=1)
    with RunReader(run) as reader:
        assert policies_of(reader, digest) == []
        record = VersionRecord(
            time_ms=1, epoch=1, version=7, kind="anchor", label="anchor", payload_bytes=1, full_bytes=1, changed_fraction=1.0,
            result_digest=digest,
        )  # fmt: skip
        with (run / "versions.jsonl").open("ab") as file:
            file.write(record.line())
        assert policies_of(reader, digest) == [PolicyVersion(1, 7)]


def test_differences_are_shown_token_by_token() -> None:
    spans = [{"epoch": 1, "version": 0, "start": 0}, {"epoch": 1, "version": 1, "start": 2}]
    row = ROW | {"version_spans": spans, "logprobs": [-1.0, -2.0, -3.0, -4.0], "learner_logprobs": None}
    found = Recomputed(PolicyVersion(1, 0), "ab", "from the channel", [-1.0, -2.5, -3.0, -5.0])
    lines = replay_recompute.render(row, found, pieces=None, most=None).splitlines()
    assert lines[0] == "east/p/1/0 under e1.v0 (from the channel, digest ab)"
    assert "differs by 1 at most" in lines[1]
    assert lines[2] == "of the 2 tokens that e1.v0 itself sampled: 0.5 at most"
    assert [line.split()[-1] for line in lines[5:]] == ["+0.00e+00", "-5.00e-01", "+0.00e+00", "-1.00e+00"]
    assert replay_recompute.as_json(row, found)["sampled_by"] == ["e1.v0", "e1.v0", "e1.v1", "e1.v1"]
