"""Which manifests take a follower from the weights it has to the head of the channel.

Invariant: a plan is a chain. It begins with an anchor or with a delta whose base digest is the digest of the weights
at hand, and each later delta's base digest is its predecessor's result digest; all are of the head's epoch, in the
follower's layout and codec, for the follower's run. Nothing is guessed from version numbers alone. Held by
tests/unit/producers/test_weight_follower.py.
"""

from __future__ import annotations

from anabranch.kernels.delta_codec import CODEC
from anabranch.schemas.errors import ManifestError, ModelMismatchError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_channel import WeightChannel


def plan_path(
    channel: WeightChannel,
    *,
    run: str,
    layout_hash: str,
    have: tuple[PolicyVersion, str] | None,
    head: PolicyVersion,
) -> list[Manifest]:
    """The cheaper, by payload bytes, of the delta chain from `have` (policy, digest) and of anchor + deltas.

    Raises:
        ManifestError: the channel offers no unbroken path (retried by the caller: retention or a commit may be under way).
        ModelMismatchError: the head's weights are of another layout.
        StreamUnavailableError: the channel cannot be reached.
    """
    paths = []
    if have is not None and have[0].epoch == head.epoch and have[0].version <= head.version:
        paths.append(_chain(channel, have[0], have[1], head))
    anchor = channel.newest_anchor(head.epoch, head.version)
    if anchor is not None:
        tail = _chain(channel, anchor.policy, anchor.result_digest, head)
        paths.append(None if tail is None else [anchor, *tail])
    complete = [p for p in paths if p is not None]
    if not complete:
        raise ManifestError(f"no unbroken path to {head} from {have[0] if have else 'nothing'} on the channel")
    best = min(complete, key=lambda path: (sum(m.payload_bytes for m in path), len(path)))
    for manifest in best:
        _check(manifest, run, layout_hash)
    return best


def _chain(channel: WeightChannel, at: PolicyVersion, digest: str, head: PolicyVersion) -> list[Manifest] | None:
    chain: list[Manifest] = []
    while at != head:
        delta = channel.manifest(PolicyVersion(at.epoch, at.version + 1), "delta")
        if delta is None or delta.base_version != at.version or delta.base_digest != digest:
            return None
        chain.append(delta)
        at, digest = delta.policy, delta.result_digest
    return chain


def _check(manifest: Manifest, run: str, layout_hash: str) -> None:
    if manifest.run != run:
        raise ManifestError(f"manifest {manifest.policy} is of run {manifest.run!r}, this producer serves {run!r}")
    if manifest.layout_hash != layout_hash:
        raise ModelMismatchError(
            f"weights {manifest.policy} on the channel have layout {manifest.layout_hash}, the model at model.path has "
            f"{layout_hash}: point model.path at the checkpoint that the learner started from"
        )
    if manifest.codec != CODEC:
        raise ManifestError(f"manifest {manifest.policy} uses codec {manifest.codec!r}; this program reads {CODEC!r}")
