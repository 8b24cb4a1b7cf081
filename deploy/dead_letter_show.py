"""The `show` of `anabranch dead-letter`: all that can be read of one dead letter.

Invariant: nothing of an entry is trusted: each part is shown with the verdict of the check that readers make, a part that
cannot be read never hides another, and bytes reach the terminal only escaped (deploy/plain_text.py). Held by
tests/unit/deploy/test_dead_letter_show.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from anabranch.deploy.dead_letters import row_json, row_of
from anabranch.deploy.plain_text import hexdump, plain, time_of_id
from anabranch.schemas.envelope import open_envelope
from anabranch.schemas.errors import TrajectoryError, UsageError, WireError
from anabranch.schemas.trajectory import decode_group, read_batch
from anabranch.transport.aside import Aside
from anabranch.transport.dead_letters import DeadLetter

_ENVELOPE = ("v", "producer", "seq", "group", "size", "xxh3")
_HEX_BYTES = 256
_TEXT_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Shown:
    """`envelope`, `group`: "" if readers would take it, else what they say. `rollouts`: rows of the record batch as
    plain values, also of one that breaks a rule; None if there is no batch to be read."""

    region: str
    letter: DeadLetter
    envelope: str
    group: str
    rollouts: list[dict[str, Any]] | None

    @property
    def payload(self) -> bytes | None:
        return self.letter.fields.get(b"payload")


def examine(region: str, letter: DeadLetter, *, run: str, max_entry_bytes: int) -> Shown:
    """What readers of run `run` would say of it now."""
    payload = letter.fields.get(b"payload")
    rollouts = None if payload is None else _rows(payload)
    return Shown(region, letter, *verdicts(letter.fields, run=run, max_entry_bytes=max_entry_bytes), rollouts)


def verdicts(fields: Mapping[bytes, bytes], *, run: str, max_entry_bytes: int) -> tuple[str, str]:
    """Why the envelope and why the group in the payload would be refused; "" for each that would not."""
    envelope, group = "", ""
    index: int | None = None
    try:
        index = open_envelope(fields, max_entry_bytes=max_entry_bytes).group_index
    except WireError as error:
        envelope = str(error)
    try:
        if (payload := fields.get(b"payload")) is None:
            raise TrajectoryError("there is no payload")
        found = decode_group(payload)
        if found.run != run or index not in (None, found.group_index):
            raise TrajectoryError(f"payload is of run {found.run!r}, group {found.group_index}")
    except WireError as error:
        group = str(error)
    return envelope, group


def _rows(payload: bytes) -> list[dict[str, Any]] | None:
    try:
        rows: list[dict[str, Any]] = read_batch(payload).to_pylist()
    except (WireError, ValueError):  # ValueError: text that is not UTF-8
        return None
    return rows


def save_payload(shown: Shown, path: Path) -> int:
    """Write the payload as it is to the new file `path`; its size. Raises UsageError: no payload, or the file exists."""
    if shown.payload is None:
        raise UsageError(f"letter {shown.letter.letter_id} has no payload")
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; give the payload another name")
    with Aside(path) as aside:
        aside.path.write_bytes(shown.payload)
        aside.commit()
    return len(shown.payload)


def render(shown: Shown) -> str:
    letter = shown.letter
    lines = [
        f"letter {letter.letter_id} in region {shown.region}",
        f"  {'cause':<14}{plain(letter.cause)}",
        f"  {'set aside':<14}{time_of_id(letter.letter_id)} UTC, by the region's clock, by group {plain(letter.group)}",
        f"  {'entry':<14}{plain(letter.entry_id)}, stored {time_of_id(letter.entry_id)} UTC",
        "",
        f"envelope: {_verdict(shown.envelope)}",
    ]
    known = {name: letter.fields.get(name.encode()) for name in _ENVELOPE}
    for name, value in known.items():
        lines.append(f"  {name:<14}{'missing' if value is None else plain(value, 100)}{_beside(name, value, shown)}")
    others = {
        name: value for name, value in letter.fields.items() if name.decode("latin1") not in (*_ENVELOPE, "payload")
    }
    lines += [f"  {plain(name, 40)}: {len(value):,} bytes, {plain(value, 60)}" for name, value in others.items()]
    lines += ["", f"payload: {_verdict(shown.group)}"]
    if shown.rollouts is not None:
        lines += _rollout_lines(shown.rollouts)
    elif shown.payload:
        lines += [
            f"  first of {len(shown.payload):,} bytes:",
            *(f"  {row}" for row in hexdump(shown.payload, _HEX_BYTES)),
        ]
    return "\n".join(lines)


def _verdict(fault: str) -> str:
    return f"REFUSED: {plain(fault)}" if fault else "in order"


def _beside(name: str, value: bytes | None, shown: Shown) -> str:
    """What the payload itself says to that field."""
    if value is None or shown.payload is None or name not in ("size", "xxh3"):
        return ""
    actual = str(len(shown.payload)) if name == "size" else xxhash.xxh3_64_hexdigest(shown.payload)
    return "" if value == actual.encode() else f"   WRONG: of this payload it is {actual}"


def _rollout_lines(rows: list[dict[str, Any]]) -> list[str]:
    first = rows[0]
    lines = [
        f"  {name:<14}{plain(str(first[name]), 100)}"
        for name in ("run", "region", "producer", "group_index", "attempt", "prompt_text", "answer")
    ]
    lines += [
        "",
        f"  {'sample':>6} {'tokens':>7} {'reward':>9} {'lowest logp':>11} {'finish':<8} {'sampled by':<22} text",
    ]
    for row in rows:
        logprobs, versions = (
            row["logprobs"] or [],
            [f"e{s['epoch']}.v{s['version']}" for s in row["version_spans"] or []],
        )
        by = versions[0] if len(set(versions)) == 1 else f"{versions[0]}..{versions[-1]}" if versions else "-"
        odd = [value for value in logprobs if not math.isfinite(value)]
        lowest = odd[0] if odd else min(logprobs, default=math.nan)
        lines.append(
            f"  {row['sample_index']:>6} {len(row['token_ids']):>7,} {row['reward']:>9g} {lowest:>11.4g} "
            f"{plain(row['finish_reason'], 8):<8} {by:<22} {plain(row['text'], _TEXT_WIDTH)}"
        )
    return lines


def as_json(shown: Shown) -> dict[str, Any]:
    """All of it; numbers that are not finite as text, a payload that is no batch as the hex of its first bytes."""
    letter = shown.letter
    fields = {plain(name, 100): plain(value, 1000) for name, value in letter.fields.items() if name != b"payload"}
    payload = shown.payload
    value = {
        "region": shown.region,
        **row_json(row_of(shown.region, letter)),
        "fields": fields,
        "envelope_refused": shown.envelope or None,
        "payload_bytes": None if payload is None else len(payload),
        "payload_xxh3": None if payload is None else xxhash.xxh3_64_hexdigest(payload),
        "payload_refused": shown.group or None,
        "rollouts": shown.rollouts,
        "payload_head": None if shown.rollouts is not None or payload is None else payload[:_HEX_BYTES].hex(),
    }
    return {name: _jsonable(part) for name, part in value.items()}


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_jsonable(part) for part in value]
    if isinstance(value, dict):
        return {name: _jsonable(part) for name, part in value.items()}
    return value
