"""`anabranch weights log`: the versions on the channel, newest last, and new ones as they come.

Invariant: a line says what the version's manifests and the channel's pins and leases say, nothing else. Following polls,
so it outlives a hub that is away for a while. Held by tests/unit/deploy/test_weights_log.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.deploy.weights_versions import Version, age_text, head_or_fault, versions_of
from anabranch.schemas.errors import ManifestError, StreamUnavailableError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_channel import Lease, WeightChannel

POLL_S = 1.0
_MANIFESTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Line:
    """One version. `manifest` is the one that made it a version; None if it cannot be read."""

    version: Version
    manifest: Manifest | None
    is_head: bool
    pin: str | None
    leases: tuple[Lease, ...]


def read_log(channel: WeightChannel, *, last: int, above: PolicyVersion | None = None) -> list[Line]:
    """The newest `last` versions, of those after `above`, oldest first; none is marked as the head if that
    cannot be read. Raises StreamUnavailableError."""
    (head, _), pins = head_or_fault(channel), channel.pins()
    leases: dict[PolicyVersion, list[Lease]] = {}
    for lease in channel.leases():
        leases.setdefault(lease.policy, []).append(lease)
    versions = versions_of(channel.index(above=above))[-last:]
    return [
        Line(v, manifest, v.policy == head, pins.get(v.policy), tuple(leases.get(v.policy, ())))
        for v, manifest in zip(versions, _first_manifests(channel, versions), strict=True)
    ]


def _first_manifests(channel: WeightChannel, versions: Sequence[Version]) -> Iterator[Manifest | None]:
    """None also for a manifest that is not valid: `anabranch weights verify` says what is wrong with it."""
    for at in range(0, len(versions), _MANIFESTS_AT_ONCE):
        names = [(v.policy, v.labels[0]) for v in versions[at : at + _MANIFESTS_AT_ONCE]]
        try:
            yield from channel.manifests(names)
        except ManifestError:
            for name in names:
                try:
                    yield from channel.manifests([name])
                except ManifestError:
                    yield None


HEADING = (
    f"{'version':<12} {'step':>13} {'of dense':>8} {'changed':>8} {'stored':>14}  {'digest':<12} {'signed by':<9} "
    f"{'age':>7}  manifests"
)


def text_of(line: Line, now_ms: int) -> str:
    """One row under `HEADING`. `step` is the payload from the version before, `stored` that of all its manifests."""
    v, m = line.version, line.manifest
    of_dense = changed = signed = age = "-"
    if m is not None:
        of_dense = f"{v.step_bytes / max(1, m.full_bytes):.2%}"
        changed = f"{m.changed_elements / max(1, m.total_elements):.2%}"
        signed = m.signature.key[:8] if m.signature else "-"
        age = age_text((now_ms - m.published_ms) / 1000)
    return (
        f"{v.policy!s:<12} {v.step_bytes:>13,} {of_dense:>8} {changed:>8} {v.stored_bytes:>14,}  {v.digest[:12]:<12} "
        f"{signed:<9} {age:>7}  {' '.join(v.labels)}{_marks(line)}"
    )


def _marks(line: Line) -> str:
    marks = ["head"] if line.is_head else []
    if line.pin is not None:
        marks.append(f"pinned: {line.pin}" if line.pin else "pinned")
    if line.leases:
        marks.append(f"leased by {', '.join(sorted(lease.holder for lease in line.leases))}")
    return f"  [{'; '.join(marks)}]" if marks else ""


def json_of(line: Line) -> dict[str, Any]:
    v, m = line.version, line.manifest
    published: Mapping[str, Any] = {}
    if m is not None:
        published = {
            "full_bytes": m.full_bytes,
            "changed_elements": m.changed_elements,
            "total_elements": m.total_elements,
            "learner_step": m.learner_step,
            "published_ms": m.published_ms,
            "signed_by": m.signature.key if m.signature else None,
        }
    return {
        "version": str(v.policy),
        "manifests": list(v.labels),
        "bytes": v.step_bytes,
        "stored_bytes": v.stored_bytes,
        "digest": v.digest,
        **published,
        "head": line.is_head,
        "pinned": line.pin,
        "leases": [{"holder": lease.holder, "expires_in_ms": lease.expires_in_ms} for lease in line.leases],
    }


def follow(
    channel: WeightChannel,
    say: Callable[[Line], None],
    warn: Callable[[str], None],
    *,
    after: PolicyVersion | None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """`say` every version after `after` when it comes, until the caller is interrupted. An unreachable hub is told
    once by `warn`, and asked again."""
    away = False
    while True:
        try:
            lines = read_log(channel, last=1000, above=after)
            away = False
        except StreamUnavailableError as error:
            if not away:
                warn(f"{error}; trying again")
            away, lines = True, []
        for line in lines:
            say(line)
            after = line.version.policy
        sleep(POLL_S)


def json_text(line: Line) -> str:
    """One JSON object on one line."""
    return json.dumps(json_of(line))
