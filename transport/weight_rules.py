"""The rules of the weight channel that do not depend on where it is kept: what is accepted, and what must stay.

Invariant: what is handed on is what its name says. While the entries of `needed` stay, a follower that has nothing can
reach the head and every pinned version. Held by tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from anabranch.schemas.errors import AnabranchError, ConfigError, ManifestError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_path import cheapest_path


def needed(
    entries: Iterable[IndexEntry], head: PolicyVersion | None, pins: Collection[PolicyVersion]
) -> set[IndexEntry]:
    """Entries on the cheapest path from nothing to the head and to each pin."""
    known = list(entries)
    kept: set[IndexEntry] = set()
    for goal in {*pins, *([] if head is None else [head])}:
        kept.update(cheapest_path(known, None, goal) or ())
    return kept


def drop_batches(entries: Iterable[IndexEntry], *, chunks: int = 20_000) -> Iterator[list[IndexEntry]]:
    """`entries` in pieces that do not hold a server up for long: few chunks, or a single entry."""
    batch: list[IndexEntry] = []
    size = 0
    for entry in entries:
        if batch and size + entry.chunks + 20 > chunks:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.chunks + 20
    if batch:
        yield batch


def checked_layout(text: bytes | str, layout_hash: str) -> Layout:
    """Raises ManifestError unless `text` is a layout with that hash."""
    layout = Layout.from_json(text)
    if layout.hash != layout_hash:
        raise ManifestError(f"the layout stored under {layout_hash} has hash {layout.hash}: it was altered")
    return layout


def checked_manifest(text: bytes | str, run: str, policy: PolicyVersion, label: str) -> Manifest:
    """Raises ManifestError unless `text` is the manifest that it is stored as."""
    manifest = Manifest.from_json(text)
    if (manifest.run, manifest.policy, manifest.label) != (run, policy, label):
        raise ManifestError(
            f"what is stored as {label} {policy} of run {run!r} is {manifest.label} {manifest.policy} of run "
            f"{manifest.run!r}: it was put there by somebody else"
        )
    return manifest


def check_run(manifest: Manifest, run: str) -> None:
    if manifest.run != run:
        raise ManifestError(f"manifest of run {manifest.run!r} on the channel of run {run!r}")


def not_readable(what: str, run: str) -> ManifestError:
    return ManifestError(f"{what} of run {run!r} is not readable: it was put there by somebody else")


def refusal(manifest: Manifest, outcome: str, details: list[str]) -> AnabranchError:
    """The error for a commit that the channel refused. A newer epoch is a ConfigError: of two learners on one run a
    restart would open yet another epoch and fence the other one, for ever in turns; after a rollback somebody decides."""
    about = f"{manifest.label} {manifest.policy} of run {manifest.run!r} refused: "
    base = f"its base {manifest.base.policy}" if manifest.base else "its base"
    met = details[0] if details else ""
    if outcome in ("stale", "fenced"):
        done = f"the head is already at {met}" if outcome == "stale" else f"epoch {met} has been opened"
        return ConfigError(
            f"{about}{done}: another learner works on this run, or somebody rolled it back (anabranch weights rollback): "
            "this one must stop. Run one learner per run; after a rollback start it again"
        )
    if outcome == "unreadable":
        return ManifestError(f"{about}{not_readable(met, manifest.run)}")
    reasons = {
        "differs": "another manifest stands under that version and label",
        "passed": f"that version is not on the channel and the head is already at {met}",
        "unknown version": "that version is not on the channel (dropped by retention, or never published)",
        "other result": f"that version is there with digest {met}, not {manifest.result_digest}",
        "no base": f"{base} is not on the channel (dropped by retention, or never published)",
        "other base": f"{base} has digest {met} there, not {manifest.base.digest if manifest.base else ''}",
        "not the head": f"{base} is not the head, which is {met}",
        "missing": f"{met} is not on the channel; store it before the commit",
    }
    return ManifestError(about + reasons[outcome])
