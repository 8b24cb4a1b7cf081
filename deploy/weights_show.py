"""`anabranch weights show`: every manifest of one version, in full, and the way to it.

Invariant: what is shown is what the manifests say and whether their signatures hold; chunks are not fetched.
Held by tests/unit/deploy/test_weights_show.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from anabranch.deploy.weights_path import step_json, step_lines
from anabranch.deploy.weights_versions import Version, find_version, published_head
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import Lease, WeightChannel
from anabranch.transport.weight_path import cheapest_path, path_bytes


@dataclass(frozen=True, slots=True)
class Shown:
    """`manifests`: label, and the manifest or why it cannot be shown. `way`: from nothing, None if there is none."""

    version: Version
    is_head: bool
    manifests: tuple[tuple[str, Manifest | str], ...]
    way: list[IndexEntry] | None
    pin: str | None
    leases: tuple[Lease, ...]


def read_version(channel: WeightChannel, run: str, name: str) -> Shown:
    """Raises UsageError: no such version. TemporaryError: nothing is published yet."""
    head = published_head(channel, run)
    entries = channel.index()
    version = find_version(name, entries, head)
    return Shown(
        version,
        version.policy == head,
        tuple((entry.label, _manifest(channel, entry)) for entry in version.entries),
        cheapest_path(entries, None, version.policy),
        channel.pins().get(version.policy),
        tuple(lease for lease in channel.leases() if lease.policy == version.policy),
    )


def _manifest(channel: WeightChannel, entry: IndexEntry) -> Manifest | str:
    try:
        (manifest,) = channel.manifests([(entry.policy, entry.label)])
    except ManifestError as error:
        return str(error)
    return manifest if manifest is not None else "it is in the index, but not on the channel"


def as_json(shown: Shown, judge: Callable[[Manifest], str]) -> dict[str, Any]:
    """`judge` says in words how a manifest is signed."""
    return {
        "version": str(shown.version.policy),
        "head": shown.is_head,
        "digest": shown.version.digest,
        "pinned": shown.pin,
        "leases": [{"holder": lease.holder, "expires_in_ms": lease.expires_in_ms} for lease in shown.leases],
        "path_from_nothing": None if shown.way is None else [step_json(entry) for entry in shown.way],
        "manifests": [
            {"label": label, "unreadable": m}
            if isinstance(m, str)
            else {"label": label, "signature_check": judge(m), "manifest": m.model_dump(mode="json")}
            for label, m in shown.manifests
        ],
    }


def render(shown: Shown, judge: Callable[[Manifest], str]) -> str:
    v = shown.version
    lines = [f"{v.policy}{', the head' if shown.is_head else ''}: {', '.join(v.labels)}"]
    if shown.pin is not None:
        lines.append(f"pinned{': ' + shown.pin if shown.pin else ''}")
    lines += [f"leased by {lease.holder} for {lease.expires_in_ms / 1000:.0f} s more" for lease in shown.leases]
    for label, manifest in shown.manifests:
        lines.append("")
        lines += (
            [f"{label}: UNREADABLE: {manifest}"] if isinstance(manifest, str) else _block(manifest, judge(manifest))
        )
    lines += ["", "path from nothing"]
    if shown.way is None:
        lines.append("none: only followers that serve an older version get there")
    else:
        lines += step_lines(shown.way)
        lines.append(f"{'total':<26} {path_bytes(shown.way):>14,}")
    return "\n".join(lines)


def _block(m: Manifest, signature: str) -> list[str]:
    published = datetime.fromtimestamp(m.published_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")
    rows = {
        "format": f"{m.format}, codec {m.codec}",
        "run": f"{m.run}, epoch {m.epoch}, which began at version {m.fork_version}",
        "base": f"{m.base.policy}, digest {m.base.digest}" if m.base else "none",
        "result": f"{m.policy}, digest {m.result_digest}",
        "layout": m.layout_hash,
        "payload": f"{m.payload_bytes:,} bytes, {m.payload_bytes / max(1, m.full_bytes):.4%} of {m.full_bytes:,} dense",
        "chunks": _chunks(m),
        "changed": f"{m.changed_elements:,} of {m.total_elements:,} elements "
        f"({m.changed_elements / max(1, m.total_elements):.4%})",
        "learner step": str(m.learner_step),
        "published": f"{published[:-6]} UTC, by the learner's clock",
        "signature": signature,
    }
    return [m.label, *(f"  {what:<14}{value}" for what, value in rows.items())]


def _chunks(m: Manifest) -> str:
    sizes = [chunk.size_bytes for chunk in m.chunks]
    if not sizes:
        return "none"
    if len(sizes) == 1:
        return f"1 of {sizes[0]:,} bytes"
    return f"{len(sizes)}, smallest {min(sizes):,}, median {median(sizes):,.0f}, largest {max(sizes):,} bytes"
