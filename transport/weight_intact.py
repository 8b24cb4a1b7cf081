"""Whether a path of the weight channel can be followed: every manifest and every chunk of it is there and intact.

Invariant: None only after each manifest was read and found to be what the index says, linked to the one before it by
version and digest, and each chunk was read whole and matched its digest. No more chunks than threads are in memory at
once. What the chunks decode to is not looked at. Held by tests/contract/test_weight_intact.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from anabranch.schemas.errors import DeltaError, ManifestError
from anabranch.schemas.manifest import Chunk, Manifest
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import WeightChannel

Broken = tuple[IndexEntry, str]
_MANIFESTS_AT_ONCE = 64


def first_broken(
    channel: WeightChannel,
    path: Sequence[IndexEntry],
    *,
    threads: int = 1,
    progress: Callable[[int], object] = lambda _: None,
    check: Callable[[Manifest], object] = lambda _: None,
) -> Broken | None:
    """The first entry of `path` that cannot be read, and why; None if all of it can. Manifests are read before chunks.

    Args:
        path: as `cheapest_path` returns it; the state before its first entry is not looked at.
        threads: chunks read at once.
        progress: told of payload bytes as they are done; in all those of `path`.
        check: raises ManifestError or DeltaError for a manifest that followers would refuse (its signature, its codec).

    Raises:
        StreamUnavailableError: the channel or its blob store cannot be reached: nothing is known about `path`.
    """
    manifests: list[Manifest] = []
    for entry, manifest in zip(path, _read(channel, path), strict=True):
        before = manifests[-1] if manifests else None
        try:
            if isinstance(manifest, ManifestError):
                raise manifest
            manifests.append(_checked(channel, entry, manifest, before))
            check(manifests[-1])
        except (ManifestError, DeltaError) as error:
            return entry, str(error)
    chunks = [(entry, chunk) for entry, m in zip(path, manifests, strict=True) for chunk in m.chunks]
    return _first_broken_chunk(channel, chunks, threads, progress)


def _read(channel: WeightChannel, path: Sequence[IndexEntry]) -> list[Manifest | ManifestError | None]:
    found: list[Manifest | ManifestError | None] = []
    for at in range(0, len(path), _MANIFESTS_AT_ONCE):
        names = [(entry.policy, entry.label) for entry in path[at : at + _MANIFESTS_AT_ONCE]]
        try:
            found += channel.manifests(names)
        except ManifestError:  # one of them; which one, each by itself tells
            for name in names:
                try:
                    found += channel.manifests([name])
                except ManifestError as error:
                    found.append(error)
    return found


def _checked(channel: WeightChannel, entry: IndexEntry, manifest: Manifest | None, before: Manifest | None) -> Manifest:
    if manifest is None:
        raise ManifestError("its manifest is missing, the index has it")
    if IndexEntry.of(manifest) != entry:
        raise ManifestError("the index says something else than its manifest")
    if before is not None:
        base = manifest.base
        if base is None or base.policy != before.policy or base.digest != before.result_digest:
            raise ManifestError(f"its base is not {before.policy} with digest {before.result_digest}")
    if before is None or before.layout_hash != manifest.layout_hash:
        channel.layout(manifest.layout_hash)
    return manifest


def _first_broken_chunk(
    channel: WeightChannel,
    chunks: Sequence[tuple[IndexEntry, Chunk]],
    threads: int,
    progress: Callable[[int], object],
) -> Broken | None:
    def fault(chunk: Chunk) -> str:
        try:
            channel.blobs.get(chunk.digest, chunk.size_bytes)
        except DeltaError as error:
            return str(error)
        return ""

    waiting: deque[tuple[IndexEntry, Chunk, Future[str]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="intact") as pool:
        try:
            for number, (entry, chunk) in enumerate(chunks):
                waiting.append((entry, chunk, pool.submit(fault, chunk)))
                while waiting and (len(waiting) > 4 * threads or number == len(chunks) - 1):
                    at, done, future = waiting.popleft()
                    if reason := future.result():
                        return at, reason
                    progress(done.size_bytes)
        finally:
            for _, _, future in waiting:
                future.cancel()
            wait([future for _, _, future in waiting])
    return None
