"""`WeightChannel` over plain Redis keys of the hub.

Invariant: that of `weight_channel.py`. One script checks a manifest and its chunks, stores it with its index entry and
moves the head; chunks that no manifest ever names expire, chunks that manifests name are counted and go with the last
of them. Methods that only read need no more than a replica, and no script.
Held by tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial

import redis

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.keys import Keys
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import EPOCH_STRIDE, IndexEntry
from anabranch.transport import scripts
from anabranch.transport.announced_blobs import CLAIM_MS, GRACE_MS, AnnouncedBlobs
from anabranch.transport.blob_store import BlobStore
from anabranch.transport.garbage import delete_claimed
from anabranch.transport.redis_blob_store import UNCOMMITTED_TTL_MS, RedisBlobStore, batched
from anabranch.transport.redis_client import Guard
from anabranch.transport.redis_replies import head_of, text_of, texts_of
from anabranch.transport.weight_channel import Lease, Named
from anabranch.transport.weight_path import cheapest_path
from anabranch.transport.weight_rules import (
    check_run,
    checked_layout,
    checked_manifest,
    drop_batches,
    needed,
    not_readable,
    refusal,
)

SHARE_TTL_MS = 30 * 60_000
_DISOWN_AT_ONCE = 500
_DROP_ATTEMPTS = 5  # head or pins moved between the decision and the act


class RedisWeightChannel:
    """The channel of one run; closing it closes its client and its blob store.

    Args:
        client: of the hub; for reading only, of a replica.
        blobs: where chunks are kept; None keeps them as keys beside the manifests.
        grace_ms: how long after its last manifest a chunk outside of Redis is kept.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        blobs: BlobStore | None = None,
        what: str = "the hub",
        grace_ms: int = GRACE_MS,
    ) -> None:
        self._client = client
        self._keys = keys
        self._grace_ms = grace_ms
        self._guard = Guard(client, what)
        self._outside = blobs
        self._blob_prefix = "" if blobs else keys.blob("")
        self._commit = scripts.load(client, "weights_commit")
        self._drop = scripts.load(client, "weights_drop")
        self._open_epoch = scripts.load(client, "weights_open_epoch")
        self._lease = scripts.load(client, "weights_lease")
        self._pin = scripts.load(client, "weights_pin")
        self._announce = scripts.load(client, "weights_announce")
        self._claim = scripts.load(client, "weights_claim_garbage")
        self._forget = scripts.load(client, "weights_forget_garbage")
        self._disown = scripts.load(client, "weights_disown")
        self._blobs: BlobStore = (
            RedisBlobStore(client, keys, what=what) if blobs is None else AnnouncedBlobs(blobs, self._announced)
        )

    @property
    def blobs(self) -> BlobStore:
        return self._blobs

    def open_epoch(self, *, above: int = 0) -> int:
        keys = [self._keys.epoch, self._keys.head]
        epoch, *unreadable = self._guard.repeat(lambda: self._open_epoch(keys=keys, args=[above]))
        if unreadable:
            raise not_readable(unreadable[0].decode(), self._keys.run)
        return int(epoch)

    def put_layout(self, layout: Layout) -> None:
        self._guard.repeat(lambda: self._client.set(self._keys.layout(layout.hash), layout.to_json()))

    def layout(self, layout_hash: str) -> Layout:
        text = self._get(self._keys.layout(layout_hash))
        if text is None:
            raise ManifestError(f"no layout {layout_hash} on the channel of run {self._keys.run!r}")
        return checked_layout(text, layout_hash)

    def put_share(self, policy: PolicyVersion, label: str, rank: int, text: str) -> None:
        key = self._keys.share(policy.epoch, policy.version, label)

        def call() -> None:
            pipe = self._client.pipeline(transaction=True)
            pipe.hset(key, str(rank), text).pexpire(key, SHARE_TTL_MS)
            pipe.execute()

        self._guard.repeat(call)

    def shares(self, policy: PolicyVersion, label: str) -> dict[int, str]:
        key = self._keys.share(policy.epoch, policy.version, label)
        found: dict[bytes, bytes] = self._guard.repeat(lambda: self._client.hgetall(key))
        return {int(rank): text.decode() for rank, text in found.items()}

    def drop_shares(self, policy: PolicyVersion, label: str) -> None:
        self._guard.repeat(lambda: self._client.unlink(self._keys.share(policy.epoch, policy.version, label)))

    def commit(self, manifest: Manifest) -> None:
        check_run(manifest, self._keys.run)
        entry, base = IndexEntry.of(manifest), manifest.base
        digests = "".join(dict.fromkeys(c.digest for c in manifest.chunks))
        keys = [
            self._keys.head,
            self._keys.epoch,
            self._keys.weight_index,
            self._keys.blob_references,
            self._keys.garbage,
            self._keys.manifest(manifest.epoch, manifest.version, manifest.label),
            self._keys.layout(manifest.layout_hash),
        ]
        args: list[str | int] = [manifest.epoch, manifest.version, manifest.kind, manifest.model_dump_json()]
        args += [entry.to_text(), entry.score]
        args += [_score(base.policy), base.digest, str(base.policy)] if base else ["", "", ""]
        args += [_head_text(manifest.policy), self._blob_prefix, digests]
        outcome, *details = [part.decode() for part in self._guard.repeat(lambda: self._commit(keys=keys, args=args))]
        if outcome != "ok":
            raise refusal(manifest, outcome, details)

    def head(self) -> PolicyVersion | None:
        return head_of(self._get(self._keys.head), self._keys.run)

    def manifests(self, names: Sequence[Named]) -> list[Manifest | None]:
        if not names:
            return []
        keys = [self._keys.manifest(policy.epoch, policy.version, label) for policy, label in names]
        texts = texts_of(self._guard.repeat(lambda: self._client.mget(keys)), "weight manifests", len(keys))
        return [
            None if text is None else checked_manifest(text, self._keys.run, policy, label)
            for text, (policy, label) in zip(texts, names, strict=True)
        ]

    def index(self, *, above: PolicyVersion | None = None) -> list[IndexEntry]:
        low = "-inf" if above is None else f"({_score(above)}"
        return _entries(self._guard.repeat(lambda: self._client.zrangebyscore(self._keys.weight_index, low, "+inf")))

    def news(self, above: PolicyVersion) -> tuple[PolicyVersion | None, list[IndexEntry]]:
        def call() -> list[object]:
            pipe = self._client.pipeline(transaction=True)
            pipe.get(self._keys.head).zrangebyscore(self._keys.weight_index, f"({_score(above)}", "+inf")
            replies: list[object] = pipe.execute()
            return replies

        head, members = self._guard.repeat(call)
        return head_of(text_of(head, "the head"), self._keys.run), _entries(members)

    def lease(self, holder: str, policy: PolicyVersion, *, ttl_ms: int) -> None:
        keys = [self._keys.weight_leases, self._keys.weight_leases_until]
        args = [holder, _named(policy), ttl_ms]
        self._guard.repeat(lambda: self._lease(keys=keys, args=args))

    def release(self, holder: str) -> None:
        def call() -> None:
            pipe = self._client.pipeline(transaction=True)
            pipe.zrem(self._keys.weight_leases_until, holder).hdel(self._keys.weight_leases, holder)
            pipe.execute()

        self._guard.repeat(call)

    def leases(self) -> list[Lease]:
        def call() -> tuple[dict[bytes, bytes], list[tuple[bytes, float]], tuple[int, int]]:
            pipe = self._client.pipeline(transaction=True)
            pipe.hgetall(self._keys.weight_leases)
            pipe.zrange(self._keys.weight_leases_until, 0, -1, withscores=True)
            pipe.time()
            versions, until, time = pipe.execute()
            return versions, until, time

        versions, until, (seconds, micros) = self._guard.repeat(call)
        now_ms = seconds * 1000 + micros // 1000
        return [
            Lease(holder.decode(), _parsed(versions[holder]), int(end_ms) - now_ms)
            for holder, end_ms in until
            if end_ms > now_ms and holder in versions
        ]

    def pin(self, policy: PolicyVersion, note: str) -> None:
        path = cheapest_path(self.index(), None, policy)
        if not path:
            raise ManifestError(f"{policy} cannot be pinned: it cannot be reached on the channel of {self._keys.run!r}")
        keys = [self._keys.pins, self._keys.weight_index]
        args = [_named(policy), note, *(entry.to_text() for entry in path)]
        if not self._guard.repeat(lambda: self._pin(keys=keys, args=args)):
            raise ManifestError(f"{policy} cannot be pinned: what leads to it was dropped just now")

    def unpin(self, policy: PolicyVersion) -> bool:
        return bool(self._guard.repeat(lambda: self._client.hdel(self._keys.pins, _named(policy))))

    def pins(self) -> dict[PolicyVersion, str]:
        found: dict[bytes, bytes] = self._guard.repeat(lambda: self._client.hgetall(self._keys.pins))
        return {_parsed(name): note.decode() for name, note in found.items()}

    def drop(self, entries: Iterable[IndexEntry]) -> list[IndexEntry]:
        wanted = set(entries)
        gone: list[IndexEntry] = []
        for _ in range(_DROP_ATTEMPTS):
            head_text = self._get(self._keys.head)
            head, pins, index = head_of(head_text, self._keys.run), self.pins(), self.index()
            kept = needed(index, head, pins)
            seen: list[bytes | str | int] = [
                head_text or b"",
                len(pins),
                *map(_named, pins),
                len(kept),
                *(entry.to_text() for entry in kept),
            ]
            changed = False
            for batch in drop_batches([e for e in index if e in wanted and e not in kept]):
                dropped = self._drop_batch(seen, batch)
                changed = dropped is None
                if dropped is None:
                    break
                gone += dropped
            if not changed:
                break
        return gone

    def _drop_batch(self, seen: Sequence[bytes | str | int], batch: list[IndexEntry]) -> list[IndexEntry] | None:
        """Those of `batch` that went, None if the channel is not as it was `seen`."""
        keys = [
            self._keys.head,
            self._keys.weight_index,
            self._keys.blob_references,
            self._keys.garbage,
            self._keys.weight_leases,
            self._keys.weight_leases_until,
            self._keys.pins,
        ]
        args = [self._keys.manifest_prefix, self._blob_prefix, self._grace_ms, *seen, *(e.to_text() for e in batch)]
        outcome, *went = self._guard.repeat(lambda: self._drop(keys=keys, args=args))
        return None if outcome == b"changed" else [IndexEntry.from_text(member.decode()) for member in went]

    def collect_garbage(self) -> int:
        if self._outside is None:
            return 0
        keys = [self._keys.garbage, self._keys.blob_references]
        return delete_claimed(
            self._outside,
            claim=lambda count: [
                d.decode() for d in self._guard.repeat(lambda: self._claim(keys=keys, args=[count, CLAIM_MS]))
            ],
            forget=lambda digests: self._guard.repeat(lambda: self._forget(keys=keys[:1], args=list(digests))),
        )

    def disown(self, digests: Iterable[str]) -> int:
        keys = [self._keys.garbage, self._keys.blob_references]
        return sum(
            int(self._guard.repeat(partial(self._disown, keys=keys, args=[self._blob_prefix, self._grace_ms, *some])))
            for some in batched(digests, _DISOWN_AT_ONCE)
        )

    def close(self) -> None:
        self._blobs.close()
        self._client.close()

    def _announced(self, digest: str) -> bool:
        args = [digest, UNCOMMITTED_TTL_MS, CLAIM_MS]
        return bool(self._guard.repeat(lambda: self._announce(keys=[self._keys.garbage], args=args)))

    def _get(self, key: str) -> bytes | None:
        return text_of(self._guard.repeat(lambda: self._client.get(key)), key)


def _head_text(policy: PolicyVersion) -> str:
    return json.dumps({"epoch": policy.epoch, "version": policy.version})


def _entries(reply: object) -> list[IndexEntry]:
    members = texts_of(reply, "the weight index")
    return [IndexEntry.from_text((member or b"").decode("utf-8", "replace")) for member in members]


def _score(policy: PolicyVersion) -> str:
    return str(policy.epoch * EPOCH_STRIDE + policy.version)


def _named(policy: PolicyVersion) -> str:
    return f"{policy.epoch}:{policy.version}"


def _parsed(name: bytes) -> PolicyVersion:
    try:
        epoch, version = name.split(b":")
        return PolicyVersion(int(epoch), int(version))
    except ValueError as error:
        raise ManifestError(f"{name[:100]!r} on the channel is not a version: it was put there by hand") from error
