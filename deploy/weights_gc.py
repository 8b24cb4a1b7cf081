"""`anabranch weights gc`: retention now, what it takes, and why the rest stays; and chunks that nothing names.

Invariant: what goes is what the learner's own retention would take under that budget (transport/weight_retention.py); a dry
run changes nothing. An orphan is a chunk that no manifest named after it was seen and that is older than `ORPHAN_AGE_S`; it
goes by the channel's garbage list, so that one which is being published stays. Held by tests/unit/deploy/test_weights_gc.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from anabranch.deploy.weights_versions import spans
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.blob_store import BlobInfo
from anabranch.transport.weight_channel import Lease, WeightChannel
from anabranch.transport.weight_path import path_bytes
from anabranch.transport.weight_retention import MANIFEST_BYTES, held_bytes, retain, surplus
from anabranch.transport.weight_rules import needed

ORPHAN_AGE_S = 3600.0
_MANIFESTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Collected:
    """`gone`: entries that were dropped (dry run: would be). `kept`: reason -> entries, the strongest reason of each."""

    budget_bytes: int
    gone: Sequence[IndexEntry]
    kept: Mapping[str, Sequence[IndexEntry]]
    chunks_deleted: int
    dry_run: bool

    @property
    def kept_bytes(self) -> int:
        """As retention counts them."""
        return sum(held_bytes(entries) for entries in self.kept.values())


def collect(channel: WeightChannel, budget_bytes: int, *, dry_run: bool) -> Collected:
    """Apply retention under `budget_bytes`. Raises StreamUnavailableError."""
    entries, head, leases, pins = channel.index(), channel.head(), channel.leases(), channel.pins()
    if dry_run:
        gone, deleted = surplus(entries, head, leases, pins, budget_bytes), 0
    else:
        gone = list(retain(channel, budget_bytes).dropped)
        deleted = channel.collect_garbage()
    taken = set(gone)
    left = [entry for entry in entries if entry not in taken]
    return Collected(budget_bytes, gone, reasons(left, head, leases, pins), deleted, dry_run)


def reasons(
    entries: Sequence[IndexEntry],
    head: PolicyVersion | None,
    leases: Sequence[Lease],
    pins: Mapping[PolicyVersion, str],
) -> dict[str, list[IndexEntry]]:
    """Why each of `entries` stays, by its strongest reason, strongest first."""
    to_head = needed(entries, head, ())
    to_pins = needed(entries, None, pins)
    holders = [(lease.policy, lease.holder) for lease in sorted(leases, key=lambda lease: (lease.policy, lease.holder))]
    found: dict[str, list[IndexEntry]] = {}
    for entry in entries:
        found.setdefault(_reason(entry, head, to_head, to_pins, pins, holders), []).append(entry)
    order = ["the head", "way of a late joiner to the head", "pinned", "way of a late joiner to what is pinned"]
    return {
        reason: found[reason]
        for reason in sorted(
            found, key=lambda r: (order.index(r) if r in order else len(order), r.startswith("within"))
        )
    }


def _reason(
    entry: IndexEntry,
    head: PolicyVersion | None,
    to_head: set[IndexEntry],
    to_pins: set[IndexEntry],
    pins: Mapping[PolicyVersion, str],
    holders: Sequence[tuple[PolicyVersion, str]],
) -> str:
    if entry.policy == head:
        return "the head"
    if entry in to_head:
        return "way of a late joiner to the head"
    if entry.policy in pins:
        return "pinned"
    if entry in to_pins:
        return "way of a late joiner to what is pinned"
    holding = [f"{holder} from {policy}" for policy, holder in holders if policy <= entry.policy]
    if holding:
        more = f" and {len(holding) - 1} more" if len(holding) > 1 else ""
        return f"leased: {holding[0]}{more}"
    return "within the budget"


def render(done: Collected) -> str:
    verb = "would go" if done.dry_run else "went"
    rows = [f"{'':<52} {'manifests':>9} {'bytes':>16} {'counted':>16}  versions"]
    rows.append(_row(verb, done.gone))
    rows += [_row(f"stays: {reason}", entries) for reason, entries in done.kept.items()]
    over = done.kept_bytes - done.budget_bytes
    state = f"{over:,} bytes over it: only what nobody can need goes" if over > 0 else "kept"
    rows.append(_row("stays in all", [entry for entries in done.kept.values() for entry in entries], versions=False))
    rows += ["", f"counted: bytes of chunks, and {MANIFEST_BYTES:,} for each manifest"]
    rows.append(f"budget {done.budget_bytes:,} bytes, {done.kept_bytes:,} counted: {state}")
    if done.chunks_deleted:
        rows.append(f"{done.chunks_deleted} chunks that were dropped before are deleted from the blob store")
    return "\n".join(rows)


def _row(what: str, entries: Sequence[IndexEntry], *, versions: bool = True) -> str:
    row = f"{what:<52} {len(entries):>9} {path_bytes(entries):>16,} {held_bytes(entries):>16,}"
    return f"{row}  {spans(entry.policy for entry in entries) if entries else '-'}" if versions else row


def find_orphans(channel: WeightChannel, *, older_s: float = ORPHAN_AGE_S) -> list[BlobInfo]:
    """Chunks older than `older_s` that no manifest names. Reads every manifest.

    Raises ManifestError if one cannot be read: what it names would be taken for orphans.
    """
    listed = [info for info in channel.blobs.list() if info.age_s > older_s]
    named: set[str] = set()
    for digests in _named_chunks(channel):  # after the listing: a manifest that comes meanwhile counts
        named.update(digests)
    return [info for info in listed if info.digest not in named]


def _named_chunks(channel: WeightChannel) -> Iterator[set[str]]:
    entries = channel.index()
    for at in range(0, len(entries), _MANIFESTS_AT_ONCE):
        some = entries[at : at + _MANIFESTS_AT_ONCE]
        manifests = channel.manifests([(entry.policy, entry.label) for entry in some])
        missing = {e for e, m in zip(some, manifests, strict=True) if m is None}
        if missing and missing & set(channel.index()):
            lost = min(missing, key=lambda e: e.score)
            raise ManifestError(
                f"{lost.policy} {lost.label} is in the index but not on the channel: its chunks are not known"
            )
        yield {chunk.digest for manifest in manifests if manifest for chunk in manifest.chunks}


def delete_orphans(channel: WeightChannel, orphans: Sequence[BlobInfo]) -> int:
    """Give them to the channel's garbage list and collect it; returns how many chunks were deleted here and now. Those in
    Redis expire by themselves some minutes later."""
    channel.disown([info.digest for info in orphans])
    return channel.collect_garbage()


def render_orphans(orphans: Sequence[BlobInfo], deleted: int | None) -> str:
    """`deleted` None: a dry run."""
    if not orphans:
        return f"orphans: none older than {ORPHAN_AGE_S / 60:.0f} minutes"
    rows = [f"orphans: {len(orphans)} chunks, {sum(info.size_bytes for info in orphans):,} bytes, named by no manifest"]
    rows += [f"  {i.digest} {i.size_bytes:>12,} bytes, {i.age_s / 3600:.1f} h old" for i in orphans[:20]]
    if len(orphans) > 20:
        rows.append(f"  ... and {len(orphans) - 20} more")
    if deleted is not None:
        rows.append(f"{deleted} deleted" if deleted else "they expire within ten minutes")
    return "\n".join(rows)
