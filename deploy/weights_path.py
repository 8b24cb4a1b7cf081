"""`anabranch weights path`: how a follower would get from one version to another, and what else it could do.

Invariant: the path shown is that of the planner every follower uses (transport/weight_path.py), over the same index.
Held by tests/unit/deploy/test_weights_path.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.deploy.weights_versions import find_version, parse_version, published_head
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_path import State, cheapest_path, path_bytes

Way = list[IndexEntry] | None


@dataclass(frozen=True, slots=True)
class Paths:
    """Ways from `start` (None: from nothing) to `goal`; None where there is none.

    `taken`: the cheapest; `chain`: one step at a time, single deltas and forks only; `fresh`: as one who has nothing.
    """

    start: PolicyVersion | None
    start_known: bool
    goal: PolicyVersion
    taken: Way
    chain: Way
    fresh: Way


def find_paths(channel: WeightChannel, run: str, start: str, goal: str) -> Paths:
    """`start` is a version's name or "nothing"; it need not be on the channel, `goal` must.

    Raises:
        UsageError: no such version.
        TemporaryError: nothing is published yet.
    """
    head = published_head(channel, run)
    entries = channel.index()
    to = find_version(goal, entries, head).policy
    at = None if start == "nothing" else parse_version(start, head)
    digest = next((entry.digest for entry in entries if entry.policy == at), "")
    state = None if at is None else State(at, digest)
    return Paths(
        at,
        bool(digest) or at is None,
        to,
        cheapest_path(entries, state, to),
        chain_of(entries, state, to),
        cheapest_path(entries, None, to),
    )


def chain_of(entries: Iterable[IndexEntry], state: State | None, goal: PolicyVersion) -> Way:
    """The plain chain to `goal`: one version at a time from `state`, or from the newest anchor that leads there."""
    single = [entry for entry in entries if entry.label in ("delta", "fork")]
    if state is not None:
        return cheapest_path(single, state, goal)
    anchors = sorted((e for e in entries if e.label == "anchor" and e.policy <= goal), key=lambda e: e.score)
    for anchor in reversed(anchors):
        chain = cheapest_path(single, State(anchor.policy, anchor.digest), goal)
        if chain is not None:
            return [anchor, *chain]
    return None


def as_json(paths: Paths) -> dict[str, Any]:
    return {
        "from": None if paths.start is None else str(paths.start),
        "to": str(paths.goal),
        "path": _way_json(paths.taken),
        "chain_of_deltas": _way_json(paths.chain),
        "from_nothing": _way_json(paths.fresh),
    }


def _way_json(way: Way) -> dict[str, Any] | None:
    if way is None:
        return None
    return {
        "bytes": path_bytes(way),
        "fetches": len(way),
        "chunks": sum(entry.chunks for entry in way),
        "steps": [step_json(entry) for entry in way],
    }


def step_json(entry: IndexEntry) -> dict[str, Any]:
    return {
        "from": None if entry.base is None else str(entry.base),
        "to": str(entry.policy),
        "label": entry.label,
        "bytes": entry.payload_bytes,
        "chunks": entry.chunks,
        "digest": entry.digest,
    }


def render(paths: Paths) -> str:
    start = "nothing" if paths.start is None else str(paths.start)
    lines = []
    if not paths.start_known:
        lines.append(
            f"{start} is not on the channel; its follower can go on only from a delta that names it as its base\n"
        )
    if paths.taken is None:
        lines.append(f"no path leads from {start} to {paths.goal}")
    elif not paths.taken:
        lines.append(f"{start} to {paths.goal}: the same state, nothing to fetch")
    else:
        lines += step_lines(paths.taken)
        lines.append(f"{'total':<26} {path_bytes(paths.taken):>14,}  {_fetches(paths.taken)}")
    lines.append("")
    lines.append(f"{'chain of single deltas':<26} {_against(paths.chain, paths.taken)}")
    lines.append(f"{'from nothing':<26} {_against(paths.fresh, paths.taken)}")
    return "\n".join(lines)


def step_lines(way: Sequence[IndexEntry]) -> list[str]:
    """A table of the steps of `way`, with a heading."""
    rows = [f"{'step':<26} {'bytes':>14}  by"]
    for entry in way:
        step = f"{entry.base or 'nothing'} -> {entry.policy}"
        rows.append(f"{step:<26} {entry.payload_bytes:>14,}  {entry.label}, {_chunks(entry.chunks)}")
    return rows


def _fetches(way: Sequence[IndexEntry]) -> str:
    return f"{len(way)} fetch{'' if len(way) == 1 else 'es'}, {_chunks(sum(entry.chunks for entry in way))}"


def _chunks(count: int) -> str:
    return f"{count} chunk{'' if count == 1 else 's'}"


def _against(way: Way, taken: Way) -> str:
    if way is None:
        return f"{'-':>14}  no such way on the channel"
    size = path_bytes(way)
    text = f"{size:>14,}  {_fetches(way)}"
    if taken and way != taken and (own := path_bytes(taken)):
        text += f", {size / own:.2f} times the bytes of the path"
    return text
