"""Which manifests take a node from the weights it has to the head of the channel.

Invariant: a plan is a chain of manifests that were read and checked: of this run, layout and codec, signed by a trusted key
where keys are configured, of the sizes that the layout allows, each as its index entry says, each with the base that the
one before results in (by digest), the first with the digest of the weights at hand. Nothing is guessed from version numbers.
Held by tests/unit/producers/test_weight_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.kernels.delta_codec import CODEC
from anabranch.schemas.errors import AnabranchError, ManifestError, ModelMismatchError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import Named, WeightChannel
from anabranch.transport.weight_path import State, cheapest_path

SHOWN = 3  # of what is broken, in a message
MOST_AT_ONCE = (
    64  # manifests read for one plan: a large one has thousands of chunks; what is beyond is planned from there
)
Check = Callable[[Manifest], None]  # raises ManifestError


class Unusable(AnabranchError):
    """Manifests that must not, or cannot, be followed, each with the reason. Another path may lead around them."""

    def __init__(self, broken: Mapping[Named, Exception]) -> None:
        said = [f"{label} {policy}: {error}" for (policy, label), error in broken.items()]
        more = [f"and {len(said) - SHOWN} more"] if len(said) > SHOWN else []
        super().__init__("; ".join(said[:SHOWN] + more))
        self.broken = dict(broken)


class AnotherState(ManifestError):
    """The base of a manifest has another digest than the weights that the path leads to."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Manifests to apply in order: the way to the head, or its first `MOST_AT_ONCE`. `same_state`: they are none, since the weights at hand are the head's already: this
    manifest says so."""

    manifests: tuple[Manifest, ...]
    same_state: Manifest | None = None

    @property
    def path(self) -> tuple[str, ...]:
        """Such as ("anchor e1.v40", "skip8 e1.v48")."""
        shown = self.manifests or ((self.same_state,) if self.same_state else ())
        return tuple(f"{m.label} {m.policy}" for m in shown)

    @property
    def needs(self) -> PolicyVersion | None:
        """The oldest version on the channel that it reads."""
        return min(((m.base.policy if m.base else m.policy) for m in self.manifests), default=None)


class Planner:
    def __init__(self, channel: WeightChannel, layout: Layout, *, run: str, verify: Check | None = None) -> None:
        """`verify` refuses a manifest whose signature is missing or of no trusted key."""
        self._channel, self._layout, self._run, self._verify = channel, layout, run, verify
        self._elements = sum(t.numel for t in layout.tensors)
        self._most_bytes = layout.payload_bytes * 5 // 4 + 64 * len(layout.tensors) + 2**20

    def plan(
        self,
        have: State | None,
        head: PolicyVersion,
        broken: Mapping[Named, Exception],
        *,
        newer: Sequence[IndexEntry] | None = None,
    ) -> Plan:
        """The cheapest path from `have` to `head`, or its beginning, around the manifests in `broken`.

        Args:
            newer: the index above `have`, if it was read just now.

        Raises:
            ManifestError: the channel offers no path (retention or a commit may be under way: ask again later).
            Unusable: manifests on the path are missing or forged.
            ModelMismatchError: there are no weights at hand, and those on the channel are of another layout.
            StreamUnavailableError: the channel cannot be reached.
        """
        if have is not None:  # what is newer is most of the time enough, and a small part of the index
            try:
                entries = self._channel.index(above=have.policy) if newer is None else newer
                found = self._plan(_usable(entries, broken), have, head)
            except Unusable as error:
                if not any(isinstance(e, AnotherState) for e in error.broken.values()):
                    raise
                found = None  # the channel's version of that number is another one: the whole index tells
            if found is not None:
                return found
        found = self._plan(_usable(self._channel.index(), broken), have, head)
        if found is None:
            start = f"from {have.policy} ({have.digest})" if have else "from nothing"
            around = f" around what is broken: {Unusable(broken)}" if broken else ""
            raise ManifestError(f"no path to weights {head} {start} on the channel{around}")
        return found

    def _plan(self, entries: Sequence[IndexEntry], have: State | None, head: PolicyVersion) -> Plan | None:
        path = cheapest_path(entries, have, head)
        if path is None:
            return None
        if path:
            return Plan(tuple(self._read(path[:MOST_AT_ONCE], have, holds_nothing=have is None)))
        assert have is not None
        return Plan((), self._same_state(entries, have, head))

    def _same_state(self, entries: Sequence[IndexEntry], have: State, head: PolicyVersion) -> Manifest:
        """A manifest that says that the head has the digest of the weights at hand: the index alone is not believed."""
        named = min((e for e in entries if e.policy == head), key=lambda e: (e.label != "fork", e.payload_bytes))
        manifest = self._read([named], None, holds_nothing=False)[0]
        if manifest.result_digest != have.digest:
            raise Unusable({(head, named.label): ManifestError(f"its digest is {manifest.result_digest}")})
        return manifest

    def _read(self, path: Sequence[IndexEntry], have: State | None, *, holds_nothing: bool) -> list[Manifest]:
        refused: dict[Named, Exception] = {}
        good: list[Manifest] = []
        for entry, manifest in zip(path, self._manifests(path), strict=True):
            try:
                if isinstance(manifest, ManifestError):
                    raise manifest
                if manifest is None:
                    raise ManifestError(
                        "it is in the index, but not on the channel (dropped meanwhile, or not there yet)"
                    )
                self._check(entry, manifest, holds_nothing=holds_nothing)
            except ManifestError as error:
                refused[entry.policy, entry.label] = error
                continue
            good.append(manifest)
        if refused:
            raise Unusable(refused)
        digest = have.digest if have is not None else None
        for manifest in good:
            if manifest.base is not None and digest is not None and manifest.base.digest != digest:
                why = AnotherState(f"it goes on from digest {manifest.base.digest}, the path gives {digest}")
                raise Unusable({(manifest.policy, manifest.label): why})
            digest = manifest.result_digest
        return good

    def _manifests(self, path: Sequence[IndexEntry]) -> Sequence[Manifest | ManifestError | None]:
        names = [(e.policy, e.label) for e in path]
        try:
            return self._channel.manifests(names)
        except ManifestError:  # one of them cannot be read: which?
            return [self._manifest(name) for name in names]

    def _manifest(self, name: Named) -> Manifest | ManifestError | None:
        try:
            return self._channel.manifests([name])[0]
        except ManifestError as error:
            return error

    def _check(self, entry: IndexEntry, manifest: Manifest, *, holds_nothing: bool) -> None:
        if self._verify is not None:
            self._verify(manifest)
        if manifest.run != self._run:
            raise ManifestError(f"it is of run {manifest.run!r}, this producer serves {self._run!r}")
        if manifest.layout_hash != self._layout.hash:
            what = (
                f"weights {manifest.policy} on the channel have layout {manifest.layout_hash}, the model at model.path has "
                f"{self._layout.hash}: point model.path at the checkpoint that the learner started from"
            )
            raise ModelMismatchError(what) if holds_nothing else ManifestError(what)
        if manifest.codec != CODEC:
            raise ManifestError(f"it uses codec {manifest.codec!r}; this program reads {CODEC!r}")
        if IndexEntry.of(manifest) != entry:
            raise ManifestError(f"the index says {entry.to_text()}, the manifest {IndexEntry.of(manifest).to_text()}")
        sizes = manifest.full_bytes, manifest.total_elements
        if sizes != (self._layout.payload_bytes, self._elements) or manifest.changed_elements > self._elements:
            raise ManifestError(f"it is of {sizes[1]} elements in {sizes[0]} bytes, the layout has {self._elements}")
        if manifest.payload_bytes > self._most_bytes:
            raise ManifestError(f"its {manifest.payload_bytes} bytes are more than such a state can take")


def _usable(entries: Sequence[IndexEntry], broken: Mapping[Named, Exception]) -> list[IndexEntry]:
    return [e for e in entries if (e.policy, e.label) not in broken]
