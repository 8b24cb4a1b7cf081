"""Deleting chunks that nobody names any more from a blob store outside of Redis.

Invariant: a chunk is deleted only while the claim of whoever deletes it counts; meanwhile nobody can put it again
(`announced_blobs.py`), and a manifest that names it is refused. Held by tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from anabranch.transport.announced_blobs import CLAIM_MS
from anabranch.transport.blob_store import BlobStore

_BATCH = 200  # chunks of one claim: deleted well within it, also one by one


def delete_claimed(
    store: BlobStore, *, claim: Callable[[int], list[str]], forget: Callable[[Sequence[str]], object]
) -> int:
    """Claim and delete until nothing is due; returns how many chunks went.

    What cannot be deleted stays claimed, and comes again when the claim has lapsed; the store's error is passed on.
    """
    total = 0
    while True:
        started = time.monotonic()
        digests = claim(_BATCH)
        if not digests:
            return total
        for digest in digests:
            if (time.monotonic() - started) * 1000 > CLAIM_MS / 4:
                break  # a slow store: the rest comes again
            store.delete([digest])
            forget([digest])
            total += 1
        else:
            continue
        return total
