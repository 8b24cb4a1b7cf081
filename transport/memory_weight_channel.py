"""`WeightChannel` in memory: the public twin of `RedisWeightChannel`.

Invariant: that of `weight_channel.py`. Several channels over one `MemoryWeightStore` see one channel, from any thread.
Held by tests/contract/test_weight_channel.py, the same suite.
"""

from __future__ import annotations

import threading
from collections import Counter

import xxhash

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_rules import Committed, check_run, checked_blob, checked_layout, droppable, refusal


class MemoryWeightStore:
    """What the channels share: the "hub"."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.lock = threading.RLock()
        self.epoch = 0
        self.head: PolicyVersion | None = None
        self.layouts: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}
        self.references: Counter[str] = Counter()
        self.manifests: dict[Committed, str] = {}  # in commit order


class MemoryWeightChannel:
    def __init__(self, store: MemoryWeightStore) -> None:
        self._store = store

    def open_epoch(self, *, above: int = 0) -> int:
        with self._store.lock:
            self._store.epoch = max(self._store.epoch, above) + 1
            return self._store.epoch

    def put_layout(self, layout: Layout) -> None:
        with self._store.lock:
            self._store.layouts[layout.hash] = layout.to_json()

    def layout(self, layout_hash: str) -> Layout:
        text = self._store.layouts.get(layout_hash)
        if text is None:
            raise ManifestError(f"no layout {layout_hash} on the channel of run {self._store.run!r}")
        return checked_layout(text, layout_hash)

    def put_blob(self, payload: bytes) -> str:
        digest: str = xxhash.xxh3_128_hexdigest(payload)
        with self._store.lock:
            self._store.blobs[digest] = bytes(payload)  # what is there may have been damaged
        return digest

    def blob(self, digest: str) -> bytes:
        return checked_blob(self._store.blobs.get(digest), digest)

    def commit(self, manifest: Manifest) -> None:
        store = self._store
        check_run(manifest, store.run)
        policy, text = manifest.policy, manifest.model_dump_json()
        digests = dict.fromkeys(c.digest for c in manifest.chunks)
        with store.lock:
            if store.epoch > policy.epoch:
                raise refusal(manifest, "fenced", [str(store.epoch)])
            if store.head is not None and store.head > policy:
                raise refusal(manifest, "stale", [str(store.head.epoch), str(store.head.version)])
            existing = store.manifests.get((policy, manifest.kind))
            if existing is not None:
                if existing != text:
                    raise refusal(manifest, "differs", [])
                return
            if manifest.layout_hash not in store.layouts:
                raise refusal(manifest, "missing", ["its layout"])
            for digest in digests:
                if digest not in store.blobs:
                    raise refusal(manifest, "missing", [f"chunk {digest}"])
            store.references.update(digests.keys())
            store.manifests[policy, manifest.kind] = text
            store.head = policy

    def head(self) -> PolicyVersion | None:
        return self._store.head

    def manifest(self, policy: PolicyVersion, kind: str) -> Manifest | None:
        text = self._store.manifests.get((policy, kind))
        return None if text is None else Manifest.from_json(text)

    def newest_anchor(self, epoch: int, at_most_version: int) -> Manifest | None:
        with self._store.lock:
            anchors = [
                policy
                for policy, kind in self._store.manifests
                if kind == "anchor" and policy.epoch == epoch and policy.version <= at_most_version
            ]
            return self.manifest(max(anchors), "anchor") if anchors else None

    def retain(self, keep_versions: int) -> int:
        store = self._store
        with store.lock:
            gone = droppable(list(store.manifests), keep_versions)
            for member in gone:
                for digest in {c.digest for c in Manifest.from_json(store.manifests.pop(member)).chunks}:
                    store.references[digest] -= 1
                    if store.references[digest] <= 0:
                        del store.references[digest], store.blobs[digest]
            return len(gone)

    def close(self) -> None:
        """Nothing to close: the store lives on."""
