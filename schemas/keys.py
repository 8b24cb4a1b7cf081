"""Every Redis key and consumer-group name, with its type.

Region Redis (trajectories):
    ab:{run}:traj              stream   entries (schemas/envelope.py); inside of an append's transaction also `traj:shut`
    ab:{run}:seen              hash     producer id -> highest sequence number appended
    ab:{run}:seen_at           hash     producer id -> when it last appended something new (Unix ms, the server's clock)
    ab:{run}:open              zset     "PRODUCER SEQ" (SEQ zero-padded to 20 digits, score 0): stored, not settled by the learner
    ab:{run}:open_ids          hash     entry id -> its member of `open`
    ab:{run}:ledger            hash     produced, trained, dropped:<cause> -> count of groups; requeued, made_room -> dead
                                        letters put back, discarded; grouped -> how often the learner's group was made,
                                        again -> entries that it was given once more because of that
    ab:{run}:dead              stream   entries nobody can read, with `cause`
    ab:{run}:wcache:DIGEST     string   a weight chunk of an object store, kept for the region's producers
    ab:{run}:wcache_used       zset     DIGEST -> when it was last used (Unix ms)
    ab:{run}:wcache_sizes      hash     DIGEST -> bytes, and "total"
    ab:{run}:wcache_fetch:DIGEST string who is fetching that chunk into the cache (expires)
Hub Redis (weights, permits, status):
    ab:{run}:epoch             string   newest epoch opened (INCR)
    ab:{run}:head              string   JSON {epoch, version}: newest committed manifest
    ab:{run}:manifest:E:V:LABEL string  JSON manifest; LABEL is anchor, delta, fork, skip2, skip4, ...
    ab:{run}:layout:HASH       string   JSON layout
    ab:{run}:blob:DIGEST       string   payload chunk
    ab:{run}:blobrefs          hash     DIGEST -> manifests that name it
    ab:{run}:garbage           zset     DIGEST -> when it may be deleted from the object store (Unix ms); of chunks in
                                        Redis those that were put again while a manifest named them, until they are
                                        committed or dropped
    ab:{run}:index             zset     entries of schemas/weight_index.py, score E·2^32 + V
    ab:{run}:share:E:V:LABEL   hash     rank -> what that rank has stored of a manifest (expires)
    ab:{run}:wleases           hash     holder -> "E:V" it may still need
    ab:{run}:wleases_until     zset     holder -> expiry of that lease (Unix ms, the hub's clock)
    ab:{run}:pins              hash     "E:V" -> note
    ab:{run}:permits           hash     next, limit, batch, max_age, total, epoch, version, longest_lease (ms)
    ab:{run}:leases            zset     group index -> lease expiry (Unix ms)
    ab:{run}:holders           hash     group index -> producer whose lease it is
    ab:{run}:takes             hash     producer -> its last take, "nonce index ...": a repeated call gets the same
    ab:{run}:returned          zset     group index to hand out again, by index
    ab:{run}:attempts          hash     group index -> times handed out beyond the first, "INDEX:failed" -> times given up;
                                        until it arrives
    ab:{run}:abandoned         zset     group indices given up too often, by index: they will never arrive
    ab:{run}:eval:E:V          hash     shard index -> JSON result, or lease "expiry|producer"
    ab:{run}:eval              string   JSON {epoch, version, shards}: the evaluation wanted now
    ab:{run}:producers         hash     producer id -> JSON status (region, version served, tokens/s, ...)
    ab:{run}:producers_seen    zset     producer id -> last report (Unix ms, the hub's clock)
    ab:{run}:learner           string   JSON status
    ab:{run}:verify            string   token: every producer is to compute its live digest (expires)
    ab:{run}:run               hash     finished (reason) — producers and recorder end when it is set
"""

from __future__ import annotations

from dataclasses import dataclass

LEARNER_GROUP = "learner"
RECORDER_GROUP = "recorder"


@dataclass(frozen=True, slots=True)
class Keys:
    run: str

    def _key(self, *parts: object) -> str:
        return ":".join(["ab", self.run, *map(str, parts)])

    @property
    def trajectories(self) -> str:
        return self._key("traj")

    @property
    def seen(self) -> str:
        return self._key("seen")

    @property
    def seen_at(self) -> str:
        return self._key("seen_at")

    @property
    def ledger(self) -> str:
        return self._key("ledger")

    @property
    def open_entries(self) -> str:
        return self._key("open")

    @property
    def open_ids(self) -> str:
        return self._key("open_ids")

    @property
    def dead_letters(self) -> str:
        return self._key("dead")

    @property
    def epoch(self) -> str:
        return self._key("epoch")

    @property
    def head(self) -> str:
        return self._key("head")

    def manifest(self, epoch: int, version: int, label: str) -> str:
        return self._key("manifest", epoch, version, label)

    @property
    def manifest_prefix(self) -> str:
        return self._key("manifest", "")

    @property
    def blob_references(self) -> str:
        return self._key("blobrefs")

    @property
    def garbage(self) -> str:
        return self._key("garbage")

    @property
    def weight_index(self) -> str:
        return self._key("index")

    def share(self, epoch: int, version: int, label: str) -> str:
        return self._key("share", epoch, version, label)

    @property
    def weight_leases(self) -> str:
        return self._key("wleases")

    @property
    def weight_leases_until(self) -> str:
        return self._key("wleases_until")

    @property
    def pins(self) -> str:
        return self._key("pins")

    def layout(self, layout_hash: str) -> str:
        return self._key("layout", layout_hash)

    def blob(self, digest: str) -> str:
        return self._key("blob", digest)

    def cached_blob(self, digest: str) -> str:
        return self._key("wcache", digest)

    def cache_fetch(self, digest: str) -> str:
        return self._key("wcache_fetch", digest)

    @property
    def cache_used(self) -> str:
        return self._key("wcache_used")

    @property
    def cache_sizes(self) -> str:
        return self._key("wcache_sizes")

    @property
    def permits(self) -> str:
        return self._key("permits")

    @property
    def leases(self) -> str:
        return self._key("leases")

    @property
    def holders(self) -> str:
        return self._key("holders")

    @property
    def takes(self) -> str:
        return self._key("takes")

    @property
    def returned(self) -> str:
        return self._key("returned")

    @property
    def attempts(self) -> str:
        return self._key("attempts")

    @property
    def abandoned(self) -> str:
        return self._key("abandoned")

    @property
    def evaluation(self) -> str:
        return self._key("eval")

    def evaluation_results(self, epoch: int, version: int) -> str:
        return self._key("eval", epoch, version)

    @property
    def producers(self) -> str:
        return self._key("producers")

    @property
    def producers_seen(self) -> str:
        return self._key("producers_seen")

    @property
    def learner(self) -> str:
        return self._key("learner")

    @property
    def verification(self) -> str:
        return self._key("verify")

    @property
    def run_state(self) -> str:
        return self._key("run")
