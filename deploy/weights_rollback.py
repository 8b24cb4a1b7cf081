"""`anabranch weights rollback`: an older version becomes the head again, in an epoch of its own.

Invariant: nothing is taken back and no bytes move: a new epoch begins with a fork of the version, which followers reach as
they reach any version. It is not done before the whole way from nothing to the version has been read and found intact
(`check_way`). A learner that still publishes is fenced by the new epoch, so it is not done behind its back without being
told to. Held by tests/unit/deploy/test_weights_rollback.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.deploy.delta_progress import progress
from anabranch.deploy.weights_versions import age_text, find_version, published_head
from anabranch.kernels.delta_codec import CODEC
from anabranch.schemas.errors import ConfigError, ManifestError, TemporaryError, UsageError
from anabranch.schemas.manifest import Base, Manifest
from anabranch.schemas.metrics import LearnerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.boards import STALE_AFTER_MS, RunBoard
from anabranch.transport.signing import Signer
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_intact import first_broken
from anabranch.transport.weight_path import State, cheapest_path, path_bytes

ENDED = ("done", "stopped")  # of learner.progress.LearnerState, which this layer must not need to import


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rollback would do. `cost_bytes`: payload for a follower that serves the head. `way`: from nothing."""

    target: PolicyVersion
    head: PolicyVersion
    learner_step: int
    cost_bytes: int
    way: Sequence[IndexEntry]
    learner: str  # a learner that reports, in words; "" if none does


def plan_rollback(channel: WeightChannel, runs: RunBoard, run: str, name: str, *, now_ms: int | None = None) -> Plan:
    """Raises:
    UsageError: no such version; it is the head's state already.
    ManifestError: a manifest or the way to it is missing: followers could not get there.
    TemporaryError: nothing is published yet.
    """
    head = published_head(channel, run)
    entries = channel.index()
    target = find_version(name, entries, head)
    digests = {entry.policy: entry.digest for entry in entries}
    if target.digest == digests.get(head):
        raise UsageError(f"the head is {head}, which is the state of {target.policy} already")
    way = cheapest_path(entries, None, target.policy)
    if way is None:
        raise ManifestError(f"no path leads to {target.policy} from nothing, so not every follower could get there")
    there = cheapest_path(entries, State(head, digests.get(head, "")), target.policy)
    step = _manifest(channel, target.policy, target.labels[0]).learner_step
    learner = _reporting(runs.learner(), now_ms if now_ms is not None else time.time_ns() // 1_000_000)
    return Plan(target.policy, head, step, path_bytes(there or ()), way, learner)


def check_way(channel: WeightChannel, plan: Plan, *, check_signature: Callable[[Manifest], None], threads: int) -> None:
    """Read every byte of the way from nothing to `plan.target`, `threads` chunks at once, with a bar on a terminal.

    Raises ManifestError if a manifest or chunk of it is missing, altered, or refused by `check_signature`.
    """

    def check(manifest: Manifest) -> None:
        check_signature(manifest)
        if manifest.codec != CODEC:
            raise ManifestError(f"its codec is {manifest.codec[:100]!r}; this program reads {CODEC!r}")

    with progress(f"reading the way to {plan.target}", path_bytes(plan.way)) as advance:
        broken = first_broken(channel, plan.way, threads=threads, progress=advance, check=check)
    if broken is not None:
        entry, reason = broken
        raise ManifestError(
            f"{plan.target} cannot become the head: {entry.policy} {entry.label}, on its way from nothing, is broken: {reason}. "
            "Nothing was changed; choose another version (anabranch weights verify lists all that is "
            "broken)"
        )


def _reporting(status: LearnerStatus | None, now_ms: int) -> str:
    """By this machine's clock: a learner whose clock is ahead counts as reporting."""
    if status is None or status.state in ENDED or now_ms - status.updated_ms > STALE_AFTER_MS:
        return ""
    since = age_text((now_ms - status.updated_ms) / 1000)
    return f"at e{status.epoch}.v{status.version}, {status.state}, reported {since} ago"


def describe(plan: Plan) -> str:
    lines = [
        f"{plan.target} becomes the head, in a new epoch. Nothing is deleted; followers that serve {plan.head} fetch "
        f"{plan.cost_bytes:,} bytes.",
        "A learner that resumes goes on from its own newest checkpoint and publishes it in a further epoch, which ends",
        f"the rollback. To train on from here, if the run directory still has a checkpoint at or below step {plan.learner_step}",
        "(`anabranch checkpoints` lists them), run on the learner's node, before it starts:",
        f"    anabranch checkpoints --give-up-above {plan.learner_step}",
    ]
    if plan.learner:
        lines.append(f"A learner works on this run ({plan.learner}): it ends with exit 78 at its next commit.")
    return "\n".join(lines)


def refuse_while_learning(plan: Plan) -> None:
    """Raises TemporaryError if a learner reports."""
    if plan.learner:
        raise TemporaryError(
            f"a learner works on this run ({plan.learner}): stop it first, or give --force and it ends with exit 78 at "
            "its next commit"
        )


def roll_back(
    channel: WeightChannel, run: str, plan: Plan, signer: Signer | None, *, signature_needed: bool
) -> Manifest:
    """Open an epoch whose first version is `plan.target`'s state. Returns the fork that was committed.

    Raises:
        ConfigError: followers want signatures and there is no key; another epoch was opened at the same moment.
        ManifestError: the version has left the channel.
    """
    if signature_needed and signer is None:
        raise ConfigError(
            "channel.trusted_keys is set, so followers refuse what is not signed: give the key with "
            "--set channel.signing_key_file=FILE"
        )
    target = plan.target
    entry = find_version(str(target), channel.index(), plan.head).entries[0]
    old = _manifest(channel, target, entry.label)
    manifest = Manifest(
        kind="fork",
        run=run,
        epoch=channel.open_epoch(),
        version=target.version,
        base=Base(epoch=target.epoch, version=target.version, digest=old.result_digest),
        result_digest=old.result_digest,
        layout_hash=old.layout_hash,
        codec=old.codec,
        chunks=(),
        full_bytes=old.full_bytes,
        changed_elements=0,
        total_elements=old.total_elements,
        learner_step=old.learner_step,
        fork_version=target.version,
        published_ms=time.time_ns() // 1_000_000,
    )
    if signer is not None:
        manifest = signer.sign(manifest)
    channel.commit(manifest)
    return manifest


def _manifest(channel: WeightChannel, policy: PolicyVersion, label: str) -> Manifest:
    (manifest,) = channel.manifests([(policy, label)])
    if manifest is None:
        raise ManifestError(f"{policy} {label} has left the channel")
    return manifest
