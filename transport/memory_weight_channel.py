"""`WeightChannel` in memory: the public twin of `RedisWeightChannel`.

Invariant: that of `weight_channel.py`. Several channels over one `MemoryWeightStore` see one channel, from any thread.
Held by tests/contract/test_weight_channel.py, the same suite.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.announced_blobs import CLAIM_MS, GRACE_MS, AnnouncedBlobs
from anabranch.transport.blob_store import BlobStore
from anabranch.transport.garbage import delete_claimed
from anabranch.transport.memory_blob_store import MemoryBlobStore
from anabranch.transport.weight_channel import Lease, Named
from anabranch.transport.weight_path import cheapest_path
from anabranch.transport.weight_rules import check_run, checked_layout, checked_manifest, needed, refusal

_UNCOMMITTED_MS = 6 * 3600 * 1000


class MemoryWeightStore:
    """What the channels share: the "hub".

    Args:
        clock_ms: its clock, for leases and grace; a test may set it.
    """

    def __init__(self, run: str, *, clock_ms: Callable[[], float] = lambda: time.time() * 1000) -> None:
        self.run = run
        self.clock_ms = clock_ms
        self.lock = threading.RLock()
        self.epoch = 0
        self.head: PolicyVersion | None = None
        self.layouts: dict[str, str] = {}
        self.blobs = MemoryBlobStore(clock_ms=clock_ms)
        self.references: Counter[str] = Counter()
        self.garbage: dict[str, float] = {}  # digest -> when due; minus the time of the claim while it is deleted
        self.manifests: dict[Named, str] = {}
        self.entries: dict[Named, IndexEntry] = {}
        self.shares: defaultdict[Named, dict[int, str]] = defaultdict(dict)
        self.leases: dict[str, tuple[PolicyVersion, float]] = {}
        self.pins: dict[PolicyVersion, str] = {}


class MemoryWeightChannel:
    """Args:
    blobs: where chunks are kept; None keeps them in the store.
    grace_ms: how long after its last manifest a chunk in `blobs` is kept.
    """

    def __init__(self, store: MemoryWeightStore, blobs: BlobStore | None = None, *, grace_ms: int = GRACE_MS) -> None:
        self._store = store
        self._outside = blobs
        self._grace_ms = grace_ms
        self._blobs: BlobStore = AnnouncedBlobs(store.blobs if blobs is None else blobs, self._announce)

    @property
    def blobs(self) -> BlobStore:
        return self._blobs

    def open_epoch(self, *, above: int = 0) -> int:
        with self._store.lock:
            published = self._store.head.epoch if self._store.head else 0
            self._store.epoch = max(self._store.epoch, above, published) + 1
            return self._store.epoch

    def put_layout(self, layout: Layout) -> None:
        with self._store.lock:
            self._store.layouts[layout.hash] = layout.to_json()

    def layout(self, layout_hash: str) -> Layout:
        text = self._store.layouts.get(layout_hash)
        if text is None:
            raise ManifestError(f"no layout {layout_hash} on the channel of run {self._store.run!r}")
        return checked_layout(text, layout_hash)

    def put_share(self, policy: PolicyVersion, label: str, rank: int, text: str) -> None:
        with self._store.lock:
            self._store.shares[policy, label][rank] = text

    def shares(self, policy: PolicyVersion, label: str) -> dict[int, str]:
        with self._store.lock:
            return dict(self._store.shares.get((policy, label), {}))

    def drop_shares(self, policy: PolicyVersion, label: str) -> None:
        with self._store.lock:
            self._store.shares.pop((policy, label), None)

    def commit(self, manifest: Manifest) -> None:
        store = self._store
        check_run(manifest, store.run)
        name, text = (manifest.policy, manifest.label), manifest.model_dump_json()
        digests = list(dict.fromkeys(c.digest for c in manifest.chunks))
        with store.lock:
            if store.epoch > manifest.epoch:
                raise refusal(manifest, "fenced", [str(store.epoch)])
            if store.head is not None and store.head.epoch > manifest.epoch:
                raise refusal(manifest, "stale", [str(store.head)])
            if name in store.manifests:
                if store.manifests[name] != text:
                    raise refusal(manifest, "differs", [])
                return
            is_new = self._check_links(manifest)
            if manifest.layout_hash not in store.layouts:
                raise refusal(manifest, "missing", ["its layout"])
            for digest in digests:
                if not self._is_stored(digest):
                    raise refusal(manifest, "missing", [f"chunk {digest}"])
            store.references.update(digests)
            for digest in digests:
                store.garbage.pop(digest, None)
            store.manifests[name], store.entries[name] = text, IndexEntry.of(manifest)
            if is_new:
                store.head = manifest.policy

    def _check_links(self, manifest: Manifest) -> bool:
        """Whether the version is a new one; raises if it does not fit what is there."""
        digests = {entry.policy: entry.digest for entry in self._store.entries.values()}
        head = self._store.head
        if manifest.base is not None:
            found = digests.get(manifest.base.policy)
            if found is None:
                raise refusal(manifest, "no base", [])
            if found != manifest.base.digest:
                raise refusal(manifest, "other base", [found])
        if (result := digests.get(manifest.policy)) is not None:
            if result != manifest.result_digest:
                raise refusal(manifest, "other result", [result])
            return False
        if manifest.kind == "skip":
            raise refusal(manifest, "unknown version", [])
        if manifest.kind == "delta" and manifest.base is not None and manifest.base.policy != head:
            raise refusal(manifest, "not the head", [str(head or "nothing")])
        if head is not None and head >= manifest.policy:
            raise refusal(manifest, "passed", [str(head)])
        return True

    def _is_stored(self, digest: str) -> bool:
        if self._outside is None:
            return digest in self._store.blobs.chunks
        return self._store.references[digest] > 0 or self._store.garbage.get(digest, 0) > 0

    def head(self) -> PolicyVersion | None:
        return self._store.head

    def manifests(self, names: Sequence[Named]) -> list[Manifest | None]:
        with self._store.lock:
            texts = [self._store.manifests.get((policy, label)) for policy, label in names]
        return [
            None if text is None else checked_manifest(text, self._store.run, policy, label)
            for text, (policy, label) in zip(texts, names, strict=True)
        ]

    def index(self, *, above: PolicyVersion | None = None) -> list[IndexEntry]:
        with self._store.lock:
            entries = sorted(self._store.entries.values(), key=lambda e: (e.score, e.to_text()))
        return [e for e in entries if above is None or e.policy > above]

    def news(self, above: PolicyVersion) -> tuple[PolicyVersion | None, list[IndexEntry]]:
        with self._store.lock:
            return self.head(), self.index(above=above)

    def lease(self, holder: str, policy: PolicyVersion, *, ttl_ms: int) -> None:
        with self._store.lock:
            self._store.leases[holder] = policy, self._store.clock_ms() + ttl_ms

    def release(self, holder: str) -> None:
        with self._store.lock:
            self._store.leases.pop(holder, None)

    def leases(self) -> list[Lease]:
        with self._store.lock:
            now = self._store.clock_ms()
            self._store.leases = {h: (p, end) for h, (p, end) in self._store.leases.items() if end > now}
            return [Lease(h, p, int(end - now)) for h, (p, end) in self._store.leases.items()]

    def pin(self, policy: PolicyVersion, note: str) -> None:
        with self._store.lock:
            if not cheapest_path(self.index(), None, policy):
                raise ManifestError(
                    f"{policy} cannot be pinned: it cannot be reached on the channel of {self._store.run!r}"
                )
            self._store.pins[policy] = note

    def unpin(self, policy: PolicyVersion) -> bool:
        with self._store.lock:
            return self._store.pins.pop(policy, None) is not None

    def pins(self) -> dict[PolicyVersion, str]:
        with self._store.lock:
            return dict(self._store.pins)

    def drop(self, entries: Iterable[IndexEntry]) -> list[IndexEntry]:
        store = self._store
        wanted = set(entries)
        with store.lock:
            index = self.index()
            free = wanted - needed(index, store.head, store.pins)
            low = min((lease.policy for lease in self.leases()), default=None)
            low = min(filter(None, (low, store.head)), default=None)
            gone = [
                entry
                for entry in index
                if entry in free and entry.policy not in store.pins and (low is None or entry.policy < low)
            ]
            for entry in gone:
                name = entry.policy, entry.label
                del store.entries[name]
                self._unreference(Manifest.from_json(store.manifests.pop(name)))
            return gone

    def _unreference(self, manifest: Manifest) -> None:
        store = self._store
        for digest in {c.digest for c in manifest.chunks}:
            store.references[digest] -= 1
            if store.references[digest] <= 0:
                del store.references[digest]
                if self._outside is None:
                    if store.garbage.pop(digest, 0) <= store.clock_ms():  # else it was put again, for another manifest
                        store.blobs.delete([digest])
                else:
                    store.garbage[digest] = max(store.clock_ms() + self._grace_ms, store.garbage.get(digest, 0))

    def collect_garbage(self) -> int:
        if self._outside is None:
            return 0
        return delete_claimed(self._outside, claim=self._claim, forget=self._forget)

    def disown(self, digests: Iterable[str]) -> int:
        store = self._store
        with store.lock:
            mine = [d for d in digests if store.references[d] <= 0 and d not in store.garbage]
            if self._outside is None:
                store.blobs.delete(mine)
            else:
                store.garbage |= dict.fromkeys(mine, store.clock_ms())
            return len(mine)

    def _announce(self, digest: str) -> bool:
        with self._store.lock:
            if self._outside is None and self._store.references[digest] <= 0:
                return True
            now, score = self._store.clock_ms(), self._store.garbage.get(digest, 0)
            if score < 0 and now + score < CLAIM_MS:
                return False
            self._store.garbage[digest] = now + _UNCOMMITTED_MS
            return True

    def _claim(self, count: int) -> list[str]:
        store = self._store
        with store.lock:
            now = store.clock_ms()
            due = [
                d for d, score in store.garbage.items() if (0 < score <= now) or (score < 0 and now + score > CLAIM_MS)
            ]
            claimed = [d for d in due if store.references[d] <= 0][:count]
            for digest in due:
                if store.references[digest] > 0:
                    del store.garbage[digest]
            store.garbage.update(dict.fromkeys(claimed, -now))
            return claimed

    def _forget(self, digests: Sequence[str]) -> None:
        with self._store.lock:
            for digest in digests:
                if self._store.garbage.get(digest, 0) < 0:
                    del self._store.garbage[digest]

    def close(self) -> None:
        """Nothing of its own to close: the store lives on."""
