"""`anabranch replay recompute`: the log-probs of a recorded completion under any published version, beside the recorded ones.

Invariant: the weights computed with are the version's: their root digest is that of its manifest, or of versions.jsonl; where neither
tells it, that is said. Nothing of the run is changed. Held by tests/unit/deploy/test_replay_recompute.py.

One row, alone, without padding or packing, at the run's sampling temperature, on the CPU: engines compute in other orders, so
differences of about 1e-6 (float32) are rounding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.token_values import Piece, token_policies
from anabranch.deploy.delta_diff import open_checkpoint
from anabranch.deploy.delta_jobs import state_digest
from anabranch.deploy.delta_states import StoredState
from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_text import number, table
from anabranch.deploy.weights_image import Image
from anabranch.deploy.weights_versions import find_version, published_head
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import CheckpointError, DeltaError, UsageError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_path import cheapest_path


@dataclass(frozen=True, slots=True)
class Recomputed:
    """`logprobs`: one per token. `policy` None: weights of a folder that no record tells the version of."""

    policy: PolicyVersion | None
    digest: str
    weights: str
    logprobs: list[float]


def image_of(
    channel: WeightChannel, run: str, version: str, *, check: Callable[[Manifest], None], threads: int
) -> tuple[PolicyVersion, Image]:
    """The state of `version` out of the channel, decoded and checked against its digest.

    Raises:
        UsageError: no such version on the channel.
        TemporaryError: nothing is published yet.
        ManifestError, DeltaError: what leads there is damaged, or signed by nobody we trust.
    """
    entries = channel.index()
    policy = find_version(version, entries, published_head(channel, run)).policy
    path = cheapest_path(entries, None, policy)
    if path is None:
        raise UsageError(f"no way leads to {policy} any more: retention dropped what it began with")
    manifests = [_manifest(channel, entry.policy, entry.label) for entry in path]
    image = Image(channel.layout(manifests[0].layout_hash))
    with Workers(threads) as workers:
        for manifest in manifests:
            check(manifest)
            chunks = [channel.blobs.get(chunk.digest, chunk.size_bytes) for chunk in manifest.chunks]
            if manifest.kind == "anchor":
                image.load(chunks)
            elif chunks:
                image.apply(image.check(chunks, workers)[1])
            if image.digest != manifest.result_digest:
                raise DeltaError(
                    f"{manifest.policy} makes a state with digest {image.digest}, its manifest says {manifest.result_digest}"
                )
    return policy, image


def _manifest(channel: WeightChannel, policy: PolicyVersion, label: str) -> Manifest:
    (manifest,) = channel.manifests([(policy, label)])
    if manifest is None:
        raise UsageError(f"{policy} {label} was dropped from the channel just now: try again")
    return manifest


@contextmanager
def exported(image: Image, source: Path) -> Iterator[Path]:
    """The image as a Hugging Face folder that goes at the end; configuration from `source`."""
    from anabranch.learner.weights import export_hf

    with tempfile.TemporaryDirectory(prefix="anabranch-replay-") as folder:
        target = Path(folder) / "model"
        export_hf(target, image.layout, image.bits, source=source)
        yield target


def folder_digest(folder: Path, *, threads: int) -> str:
    """Root digest of a Hugging Face folder's weights. Raises UsageError, CheckpointError, OSError."""
    with open_checkpoint(folder) as checkpoint:
        return state_digest(StoredState(checkpoint), "digest", threads=threads)


def policies_of(reader: RunReader, digest: str) -> list[PolicyVersion]:
    """Versions that had these weights, as versions.jsonl tells."""
    rows = reader.rows("SELECT DISTINCT epoch, version FROM versions WHERE result_digest = ? ORDER BY ALL", [digest])
    return [PolicyVersion(row["epoch"], row["version"]) for row in rows]


def compute(folder: Path, row: dict[str, Any], *, temperature: float, dtype: str = "float32") -> list[float]:
    """Log-probs of the completion's tokens. Raises ConfigError, ModelMismatchError: the model is another one."""
    import torch

    from anabranch.learner.policy import PolicyModule, load_model

    policy = PolicyModule(load_model(folder, getattr(torch, dtype)), temperature)
    ids = torch.tensor([*row["prompt_token_ids"], *row["token_ids"]])
    first = len(row["prompt_token_ids"])
    with torch.no_grad():
        found, _ = policy(
            ids[None], torch.arange(len(ids))[None], torch.empty((0, 3), dtype=torch.int64),
            torch.arange(first - 1, len(ids) - 1), ids[first:],
        )  # fmt: skip
    return [float(value) for value in found]


def check_row(row: dict[str, Any]) -> None:
    """Raises CheckpointError: there is nothing to compute from."""
    if not row["prompt_token_ids"] or not row["token_ids"]:
        raise CheckpointError(f"{row['id']} has no tokens")


def render(row: dict[str, Any], found: Recomputed, *, pieces: Piece | None, most: int | None) -> str:
    recorded = row["logprobs"]
    gaps = [abs(a - b) for a, b in zip(found.logprobs, recorded, strict=True)]
    named = "weights of no known version" if found.policy is None else str(found.policy)
    lines = [
        f"{plain(row['id'])} under {named} ({plain(found.weights)}, digest {found.digest})",
        f"log-prob of the completion {number(sum(found.logprobs), 6)}, recorded {number(sum(recorded), 6)}; "
        f"a token differs by {number(max(gaps))} at most, {number(sum(gaps) / len(gaps))} in the mean",
    ]
    same = [gap for gap, policy in zip(gaps, token_policies(row), strict=True) if policy == named]
    if same:
        lines.append(f"of the {len(same)} tokens that {named} itself sampled: {number(max(same))} at most")
    shown = row["tokens"] if most is None else min(most, row["tokens"])
    cells = _cells(row, found.logprobs, shown, pieces)
    headings = ["#", "token", "sampled by", "recorded", "learner's", "recomputed", "difference"]
    if row["learner_logprobs"] is None:
        headings.pop(4)
        cells = [[*line[:4], *line[5:]] for line in cells]
    lines += ["", *table(headings, cells, left=(1,))]
    if shown < row["tokens"]:
        lines.append(f"... {row['tokens'] - shown} more; --all-tokens shows them")
    return "\n".join(lines)


def _cells(row: dict[str, Any], logprobs: Sequence[float], shown: int, pieces: Piece | None) -> list[list[str]]:
    policies, learner = token_policies(row), row["learner_logprobs"]
    cells = []
    for at in range(shown):
        token = row["token_ids"][at]
        piece = "" if pieces is None else f" {plain(pieces(token), 18)!r}"
        recorded = row["logprobs"][at]
        cells.append(
            [str(at), f"{token}{piece}", policies[at], number(recorded, 6), number(None if learner is None else learner[at], 6),
             number(logprobs[at], 6), f"{logprobs[at] - recorded:+.2e}"]
        )  # fmt: skip
    return cells


def as_json(row: dict[str, Any], found: Recomputed) -> dict[str, Any]:
    return {
        "id": row["id"],
        "version": None if found.policy is None else str(found.policy),
        "digest": found.digest,
        "weights": found.weights,
        "token_ids": row["token_ids"],
        "sampled_by": token_policies(row),
        "recorded": row["logprobs"],
        "learner": row["learner_logprobs"],
        "recomputed": found.logprobs,
    }
