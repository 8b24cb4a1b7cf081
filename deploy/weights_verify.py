"""`anabranch weights verify`: whether everything that the channel keeps is there, genuine, and makes what it says.

Invariant: nothing is written, and everything broken is found, not only the first: a manifest that fails is left out and the
state it would have made is reached some other way if there is one. What retention drops in the meantime is not broken.
Held by tests/unit/deploy/test_weights_verify.py.

Each version's state is made once in a single image of the model. While the image stands at a version, all that starts
from there is checked over it: skips by the digest they would give, without applying them; an anchor of that version by
comparing it bit for bit. Only a fork from the middle of an epoch, or a gap behind something broken, costs another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from anabranch.deploy.weights_image import Image
from anabranch.deploy.weights_versions import spans
from anabranch.kernels.delta_codec import CODEC, inspect_chunk
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError, ManifestError
from anabranch.schemas.manifest import Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_path import State, cheapest_path

Check = Callable[[Manifest], None]


@dataclass(slots=True)
class Findings:
    """`broken`: what is wrong, in the order found; `notes`: what could not be checked, and why that is no fault."""

    manifests: int = 0
    decoded: int = 0
    chunks: int = 0
    payload_bytes: int = 0
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(
    channel: WeightChannel,
    wanted: Sequence[IndexEntry],
    *,
    check_signature: Check,
    chunks_only: bool = False,
    threads: int = 1,
    advance: Callable[[int], None] = lambda _: None,
) -> Findings:
    """Check the manifests of `wanted`, entries of the channel's index.

    Args:
        check_signature: raises ManifestError for a manifest that followers would refuse.
        chunks_only: the manifests and that every chunk is there and intact; nothing is decoded.
        threads: chunks fetched and decoded at once.
        advance: told of payload bytes as they are done.

    Raises:
        StreamUnavailableError: the channel cannot be reached.
    """
    with Workers(threads) as workers:
        walk = _Walk(channel, check_signature, workers, advance)
        if chunks_only:
            for entry in wanted:
                walk.fetch_only(entry)
        else:
            walk.decode(wanted)
    return walk.found


class _Walk:
    def __init__(
        self, channel: WeightChannel, check_signature: Check, workers: Workers, advance: Callable[[int], None]
    ) -> None:
        self.found = Findings()
        self._channel = channel
        self._check_signature = check_signature
        self._workers = workers
        self._advance = advance
        self._all = channel.index()
        self._left = set(self._all)  # entries that nothing is known against
        self._done: set[IndexEntry] = set()
        self._image: Image | None = None
        self._at: PolicyVersion | None = None  # None: the image holds no version's state

    def fetch_only(self, entry: IndexEntry) -> None:
        """Check the manifest and its chunks as bytes, and each chunk's structure."""
        manifest = self._manifest(entry)
        if manifest is None:
            return
        failed: list[str] = []
        try:
            layout = self._channel.layout(manifest.layout_hash)
            for number, chunk in enumerate(self._chunks(manifest)):
                try:
                    inspect_chunk(layout, chunk)
                except DeltaError as error:
                    failed.append(f"chunk {number} is refused: {error}")
        except (DeltaError, ManifestError) as error:
            failed.append(str(error))
        if failed:
            self._refuse(entry, "; ".join(failed))

    def decode(self, wanted: Sequence[IndexEntry]) -> None:
        versions = sorted({entry.policy for entry in wanted} | {entry.base for entry in wanted if entry.base})
        lost: list[PolicyVersion] = []
        starting: dict[PolicyVersion, list[IndexEntry]] = {policy: [] for policy in versions}
        anchors_first = sorted(wanted, key=lambda e: e.base is not None)
        for entry in anchors_first:
            starting[entry.base or entry.policy].append(entry)
        for number, policy in enumerate(versions):
            following = versions[number + 1] if number + 1 < len(versions) else None
            if not self._go_to(policy):
                lost.append(policy)
                for entry in starting[policy]:
                    if entry not in self._done and entry in self._left:
                        self.fetch_only(entry)
                        self._done.add(entry)
                continue
            for entry in sorted(starting[policy], key=lambda e: e.policy == following):  # the step onward comes last
                if entry not in self._done:
                    self._follow(entry, move=entry.policy == following)
        self._tell_lost(lost, {entry.policy for entry in wanted})

    def _tell_lost(self, lost: Sequence[PolicyVersion], wanted: set[PolicyVersion]) -> None:
        broken = [p for p in lost if p in wanted and cheapest_path(self._all, None, p) is not None]
        unknown = [p for p in lost if p not in broken]
        if broken and self.found.broken:
            self.found.broken.append(f"without what is broken no way leads to {spans(broken)}")
        if unknown:
            self.found.notes.append(
                f"not decoded: what starts from {spans(unknown)}, to which no way leads from nothing (a follower serves it)"
            )

    def _go_to(self, policy: PolicyVersion) -> bool:
        """Bring the image to `policy`, over anything that is not known to be broken. False if no way leads there."""
        while self._at != policy:
            at = None if self._at is None or self._image is None else State(self._at, self._image.digest)
            path = cheapest_path(self._left, at, policy)
            if path is None:
                return False
            if all(self._follow(entry, move=True) for entry in path):
                self._at = policy  # also where the state is the same: a fork of the version at hand
        return True

    def _follow(self, entry: IndexEntry, *, move: bool) -> bool:
        """Check `entry` over the image, which is at its base (an anchor: anywhere), and take it there if `move`."""
        manifest = self._manifest(entry)
        if manifest is None:
            return False
        try:
            if manifest.kind == "anchor":
                self._anchor(manifest)
            else:
                self._step(manifest, move=move)
        except (DeltaError, ManifestError) as error:
            self._refuse(entry, str(error))
            return False
        if move or manifest.kind == "anchor":
            self._at = manifest.policy
        if entry not in self._done:
            self._done.add(entry)
            self.found.decoded += 1
        return True

    def _anchor(self, manifest: Manifest) -> None:
        if self._at == manifest.policy and self._image is not None:
            self._image.compare(self._chunks(manifest))
            return
        if self._image is None or self._image.layout.hash != manifest.layout_hash:
            self._image = Image(self._channel.layout(manifest.layout_hash))
        self._at = None
        self._image.load(self._chunks(manifest))
        self._compare_digest(self._image.digest, manifest)

    def _step(self, manifest: Manifest, *, move: bool) -> None:
        image, base = self._image, manifest.base
        assert image is not None
        assert base is not None
        if image.layout.hash != manifest.layout_hash:
            raise ManifestError(f"its layout is {manifest.layout_hash}, that of its base {image.layout.hash}")
        if base.digest != image.digest:
            raise ManifestError(f"its base {base.policy} has digest {image.digest}, the manifest says {base.digest}")
        digest, changes = image.check(list(self._chunks(manifest)), self._workers)
        self._compare_digest(digest, manifest)
        if move:
            image.apply(changes)

    def _compare_digest(self, digest: str, manifest: Manifest) -> None:
        if digest != manifest.result_digest:
            raise DeltaError(f"makes a state with digest {digest}, the manifest says {manifest.result_digest}")

    def _manifest(self, entry: IndexEntry) -> Manifest | None:
        """The manifest of `entry`, checked by itself; None if it is broken or gone, which is noted then."""
        if entry not in self._left:
            return None
        try:
            (manifest,) = self._channel.manifests([(entry.policy, entry.label)])
            if manifest is None:
                raise ManifestError("its manifest is missing, the index has it")
            if IndexEntry.of(manifest) != entry:
                raise ManifestError("the index says something else than its manifest")
            if manifest.codec != CODEC:
                raise ManifestError(f"its codec is {manifest.codec[:100]!r}; this program reads {CODEC!r}")
            self._check_signature(manifest)
        except ManifestError as error:
            self._refuse(entry, str(error))
            return None
        if entry not in self._done:
            self.found.manifests += 1
        return manifest

    def _refuse(self, entry: IndexEntry, error: str) -> None:
        self._left.discard(entry)
        self._done.add(entry)
        if entry in self._channel.index():
            self.found.broken.append(f"{entry.policy} {entry.label}: {error}")
        else:
            self.found.notes.append(f"{entry.policy} {entry.label}: dropped by retention in the meantime")

    def _chunks(self, manifest: Manifest) -> Iterator[bytes]:
        """The chunks in order, as they come. Raises DeltaError at the end, naming every chunk that failed."""
        failed: list[str] = []
        for chunk, content in zip(manifest.chunks, self._workers.in_order(self._fetch, manifest.chunks), strict=True):
            self._advance(chunk.size_bytes)
            if isinstance(content, DeltaError):
                failed.append(str(content))
                continue
            self.found.chunks += 1
            self.found.payload_bytes += chunk.size_bytes
            if not failed:
                yield content
        if failed:
            raise DeltaError("; ".join(failed))

    def _fetch(self, chunk: Chunk) -> bytes | DeltaError:
        try:
            return self._channel.blobs.get(chunk.digest, chunk.size_bytes)
        except DeltaError as error:
            return error
