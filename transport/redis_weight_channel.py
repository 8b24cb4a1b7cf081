"""`WeightChannel` over plain Redis keys of the hub.

Invariant: that of `weight_channel.py`. One script checks a manifest's chunks and layout, stores it and moves the head;
chunks that no manifest ever names expire, chunks that manifests name are counted and go with the last of them.
Held by tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

import json

import redis
import xxhash

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.keys import Keys
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport import scripts
from anabranch.transport.redis_client import Guard
from anabranch.transport.weight_rules import Committed, check_run, checked_blob, checked_layout, droppable, refusal

UNCOMMITTED_TTL_MS = 6 * 3600 * 1000  # chunks whose learner died before the commit
_EPOCH_STRIDE = 2**32  # score in `versions` = epoch · stride + version: exact in a double for 2^21 epochs


class RedisWeightChannel:
    """The channel of one run; closing it closes its client."""

    def __init__(self, client: redis.Redis, keys: Keys, *, what: str = "the hub") -> None:
        self._client = client
        self._keys = keys
        self._guard = Guard(client, what)
        self._commit = scripts.load(client, "weights_commit")
        self._drop = scripts.load(client, "weights_drop")
        self._open_epoch = scripts.load(client, "weights_open_epoch")

    def open_epoch(self, *, above: int = 0) -> int:
        return int(self._guard.repeat(lambda: self._open_epoch(keys=[self._keys.epoch], args=[above])))

    def put_layout(self, layout: Layout) -> None:
        self._guard.repeat(lambda: self._client.set(self._keys.layout(layout.hash), layout.to_json()))

    def layout(self, layout_hash: str) -> Layout:
        text = self._get(self._keys.layout(layout_hash))
        if text is None:
            raise ManifestError(f"no layout {layout_hash} on the channel of run {self._keys.run!r}")
        return checked_layout(text, layout_hash)

    def put_blob(self, payload: bytes) -> str:
        digest: str = xxhash.xxh3_128_hexdigest(payload)
        key = self._keys.blob(digest)

        def call() -> None:
            if not self._client.set(key, payload, nx=True, px=UNCOMMITTED_TTL_MS):
                # Written again, because what is there may have been damaged; a committed chunk stays without expiry.
                self._client.set(key, payload, xx=True, keepttl=True)
                self._client.pexpire(key, UNCOMMITTED_TTL_MS, xx=True)

        self._guard.repeat(call)
        return digest

    def blob(self, digest: str) -> bytes:
        return checked_blob(self._get(self._keys.blob(digest)), digest)

    def commit(self, manifest: Manifest) -> None:
        check_run(manifest, self._keys.run)
        digests = list(dict.fromkeys(c.digest for c in manifest.chunks))
        keys = [
            self._keys.head,
            self._keys.epoch,
            self._keys.versions,
            self._keys.blob_references,
            self._keys.manifest(manifest.epoch, manifest.version, manifest.kind),
            self._keys.layout(manifest.layout_hash),
            *map(self._keys.blob, digests),
        ]
        score = manifest.epoch * _EPOCH_STRIDE + manifest.version
        args = [manifest.epoch, manifest.version, manifest.kind, manifest.model_dump_json(), score, *digests]
        outcome, *details = [part.decode() for part in self._guard.repeat(lambda: self._commit(keys=keys, args=args))]
        if outcome != "ok":
            raise refusal(manifest, outcome, details)

    def head(self) -> PolicyVersion | None:
        text = self._get(self._keys.head)
        if text is None:
            return None
        try:
            found = json.loads(text)
            return PolicyVersion(int(found["epoch"]), int(found["version"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(f"the head of run {self._keys.run!r} is not readable: {error}") from error

    def manifest(self, policy: PolicyVersion, kind: str) -> Manifest | None:
        text = self._get(self._keys.manifest(policy.epoch, policy.version, kind))
        return None if text is None else Manifest.from_json(text)

    def newest_anchor(self, epoch: int, at_most_version: int) -> Manifest | None:
        low, high = epoch * _EPOCH_STRIDE, epoch * _EPOCH_STRIDE + at_most_version
        members: list[bytes] = self._guard.repeat(lambda: self._client.zrevrangebyscore(self._keys.versions, high, low))
        for policy, kind in map(_member, members):
            if kind == "anchor":
                return self.manifest(policy, kind)
        return None

    def retain(self, keep_versions: int) -> int:
        members: list[bytes] = self._guard.repeat(lambda: self._client.zrange(self._keys.versions, 0, -1))
        gone = droppable([_member(m) for m in members], keep_versions)
        if not gone:
            return 0
        args = [self._keys.manifest_prefix, self._keys.blob("")]
        args += [f"{policy.epoch}:{policy.version}:{kind}" for policy, kind in gone]
        keys = [self._keys.versions, self._keys.blob_references]
        return int(self._guard.repeat(lambda: self._drop(keys=keys, args=args)))

    def close(self) -> None:
        self._client.close()

    def _get(self, key: str) -> bytes | None:
        value: bytes | None = self._guard.repeat(lambda: self._client.get(key))
        return value


def _member(member: bytes) -> Committed:
    epoch, version, kind = member.decode().split(":")
    return PolicyVersion(int(epoch), int(version)), kind
