"""The rules of the weight channel that do not depend on where it is kept: what is accepted, and what may go.

Invariant: bytes are handed on only if they match the name they were stored under. What retention keeps always begins
with an anchor (or nothing goes), so a follower can still reach the head and every version that is kept.
Held by tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from anabranch.schemas.errors import AnabranchError, ConfigError, DeltaError, ManifestError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion

Committed = tuple[PolicyVersion, str]  # a version and the kind of one of its manifests


def droppable(committed: Sequence[Committed], keep_versions: int) -> list[Committed]:
    """Of all manifests, in commit order, those to drop: everything before the newest anchor at or below the line
    `keep_versions` versions behind the newest."""
    order = list(dict.fromkeys(policy for policy, _ in committed))
    line = len(order) - 1 - keep_versions
    if line <= 0:
        return []
    anchors = {policy for policy, kind in committed if kind == "anchor"}
    first_kept = next((i for i in range(line, -1, -1) if order[i] in anchors), 0)
    gone = set(order[:first_kept])
    return [(policy, kind) for policy, kind in committed if policy in gone]


def checked_layout(text: bytes | str, layout_hash: str) -> Layout:
    """Raises ManifestError unless `text` is a layout with that hash."""
    layout = Layout.from_json(text)
    if layout.hash != layout_hash:
        raise ManifestError(f"the layout stored under {layout_hash} has hash {layout.hash}: it was altered")
    return layout


def checked_blob(payload: bytes | None, digest: str) -> bytes:
    """Raises DeltaError unless `payload` is there and has that xxh3-128."""
    if payload is None:
        raise DeltaError(f"chunk {digest} is not on the channel (dropped by retention, or never stored)")
    if xxhash.xxh3_128_hexdigest(payload) != digest:
        raise DeltaError(f"chunk {digest} was altered on the channel: its bytes have another digest")
    return payload


def check_run(manifest: Manifest, run: str) -> None:
    if manifest.run != run:
        raise ManifestError(f"manifest of run {manifest.run!r} on the channel of run {run!r}")


def refusal(manifest: Manifest, outcome: str, details: list[str]) -> AnabranchError:
    """The error for a commit that the channel refused. Two learners on one run are a ConfigError: a restart would open
    yet another epoch and fence the other one, for ever in turns."""
    about = f"{manifest.kind} {manifest.policy} of run {manifest.run!r}"
    if outcome == "stale":
        return ConfigError(
            f"{about} refused: the head is already at e{details[0]}.v{details[1]}, another learner works on this run; "
            "run one learner per run name"
        )
    if outcome == "fenced":
        return ConfigError(
            f"{about} refused: another learner has opened epoch {details[0]}; this one must stop, run one learner per "
            "run name"
        )
    if outcome == "differs":
        return ManifestError(f"{about} refused: another manifest stands under that version and kind")
    return ManifestError(f"{about} refused: {details[0]} is not on the channel; store it before the commit")
