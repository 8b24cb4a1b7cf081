"""A weight channel of each kind for the contract suite, and manifests to put on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import WeightChannel

LAYOUT = Layout.build([("w", "bf16", (4, 8))])


@dataclass
class World:
    """`open(grace_ms)` gives another handle on the same channel, as another process would have. `chunks_outside`: they
    are kept in a blob store beside the channel."""

    run: str
    chunks_outside: bool
    open: Callable[..., WeightChannel]
    spoil: Callable[[str, bytes], object]
    chunks: Callable[[], set[str]]


def digest_of(version: int, epoch: int = 1) -> str:
    """The root digest that the suite's version has."""
    return f"{epoch:08x}{version:024x}"


def describe(
    channel: WeightChannel,
    run: str,
    kind: str,
    version: int,
    *,
    epoch: int = 1,
    base: tuple[int, int] | None = None,
    payloads: tuple[bytes, ...] | None = None,
    digest: str | None = None,
    base_digest: str | None = None,
    **more: object,
) -> Manifest:
    """A manifest whose chunks are stored; `base` is (epoch, version), by default the version before for a delta."""
    if kind == "delta" and base is None:
        base = epoch, version - 1
    if payloads is None:
        payloads = () if kind == "fork" else (f"{epoch}.{version}.{kind}.{base}".encode(),)
    if base and base_digest is None:
        base_digest = digest_of(base[1], base[0])
    result = base_digest if kind == "fork" else digest_of(version, epoch)
    return Manifest(
        kind=kind,
        run=run,
        epoch=epoch,
        version=version,
        base=Base(epoch=base[0], version=base[1], digest=base_digest) if base else None,
        result_digest=digest or result,
        codec="test/1",
        chunks=tuple(Chunk(digest=channel.blobs.put(p), size_bytes=len(p)) for p in payloads),
        **{
            "layout_hash": LAYOUT.hash,
            "full_bytes": 64,
            "changed_elements": 1,
            "total_elements": 32,
            "learner_step": version,
            "fork_version": 0,
            "published_ms": 0,
            **more,
        },
    )


def publish(channel: WeightChannel, run: str, kind: str, version: int, **more) -> Manifest:
    channel.put_layout(LAYOUT)
    manifest = describe(channel, run, kind, version, **more)
    channel.commit(manifest)
    return manifest


def chain(channel: WeightChannel, run: str, last: int, *, epoch: int = 1, first: int = 0) -> list[Manifest]:
    """An anchor of version `first` and deltas up to `last`."""
    made = [publish(channel, run, "anchor", first, epoch=epoch)]
    return made + [publish(channel, run, "delta", version, epoch=epoch) for version in range(first + 1, last + 1)]


def entry(manifest: Manifest) -> IndexEntry:
    return IndexEntry.of(manifest)


def shown(entries: list[IndexEntry]) -> list[str]:
    """Readable: "e1.v4 skip4"."""
    return [f"{e.policy} {e.label}" for e in entries]


def v(version: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, version)
