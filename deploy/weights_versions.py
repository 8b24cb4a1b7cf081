"""Versions of the weight channel as people name them, and what hangs on each.

Invariant: a name means one version or is refused: `e1.v42`, `42` (of the head's epoch) and `head`; what is not on the
channel is told together with what is. Held by tests/unit/deploy/test_weights_versions.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anabranch.schemas.errors import ManifestError, TemporaryError, TrajectoryError, UsageError
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import WeightChannel

NOTHING = "nothing is published yet for run {run}"


@dataclass(frozen=True, slots=True)
class Version:
    """All that is on the channel of one version: its manifests' entries, the one that made it a version first."""

    policy: PolicyVersion
    entries: tuple[IndexEntry, ...]

    @property
    def digest(self) -> str:
        return self.entries[0].digest

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(entry.label for entry in self.entries)

    @property
    def step_bytes(self) -> int:
        """Payload of the way from the version before (delta: its chunks, fork: none), or of the anchor if that is all."""
        return self.entries[0].payload_bytes

    @property
    def stored_bytes(self) -> int:
        return sum(entry.payload_bytes for entry in self.entries)


def versions_of(entries: Iterable[IndexEntry]) -> list[Version]:
    """`entries` by version, ascending; of each version in the order delta, fork, anchor, skip2, skip4, ..."""
    by_policy: dict[PolicyVersion, list[IndexEntry]] = {}
    for entry in entries:
        by_policy.setdefault(entry.policy, []).append(entry)
    return [Version(policy, tuple(sorted(by_policy[policy], key=_rank))) for policy in sorted(by_policy)]


def _rank(entry: IndexEntry) -> tuple[int, int]:
    steps = entry.policy.version - entry.base.version if entry.base else 0
    return ("delta", "fork", "anchor").index(entry.label) if entry.label in ("delta", "fork", "anchor") else 3, steps


def published_head(channel: WeightChannel, run: str) -> PolicyVersion:
    """The head. Raises TemporaryError if nothing is published yet."""
    head = channel.head()
    if head is None:
        raise TemporaryError(NOTHING.format(run=run))
    return head


def head_or_fault(channel: WeightChannel) -> tuple[PolicyVersion | None, str]:
    """The head and "", or None and why it cannot be read: for those who show what else there is."""
    try:
        return channel.head(), ""
    except ManifestError as error:
        return None, str(error)


def parse_version(text: str, head: PolicyVersion) -> PolicyVersion:
    """The version that `text` names, on the channel or not. Raises UsageError: not a name of a version."""
    if text == "head":
        return head
    if text.isascii() and text.isdigit() and len(text) <= 10:
        return PolicyVersion(head.epoch, int(text))
    try:
        return PolicyVersion.parse(text)
    except TrajectoryError:
        raise UsageError(f"{text!r} names no version: e1.v42, 42 (of the head's epoch) or head") from None


def find_version(text: str, entries: Sequence[IndexEntry], head: PolicyVersion) -> Version:
    """The version on the channel that `text` names. Raises UsageError: no such name, or not on the channel."""
    policy = parse_version(text, head)
    found = [entry for entry in entries if entry.policy == policy]
    if found:
        return versions_of(found)[0]
    raise UsageError(f"{policy} is not on the channel, which holds {spans(entry.policy for entry in entries)}")


def spans(policies: Iterable[PolicyVersion]) -> str:
    """`policies` in words, unbroken ones together: "e1.v0 to e1.v42, e2.v40", or "nothing"."""
    runs: list[list[PolicyVersion]] = []
    for policy in sorted(set(policies)):
        if runs and runs[-1][-1] == PolicyVersion(policy.epoch, policy.version - 1):
            runs[-1].append(policy)
        else:
            runs.append([policy])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs) or "nothing"


def age_text(seconds: float) -> str:
    """`seconds` for a person: "12 s", "5 min", "3.2 h", "4.0 d"."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"
