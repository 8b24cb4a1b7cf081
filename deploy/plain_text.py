"""Text from the wire as a terminal may be shown it.

Invariant: what `plain` returns has no control character, no line break and nothing that changes the direction of writing, so
that no payload moves the cursor or forges a line of a table; and no password of a URL. Held by
tests/unit/deploy/test_plain_text.py.
"""

from __future__ import annotations

from datetime import UTC, datetime

from anabranch.transport.redact import redact_text

_BYTES_PER_ROW = 16


def plain(value: str | bytes, limit: int | None = None) -> str:
    """`value` (bytes: as UTF-8, others as `\\xNN`) with what is not printable escaped, cut after `limit` characters."""
    if isinstance(value, bytes):
        value = (value if limit is None else value[: 8 * limit]).decode("utf-8", "backslashreplace")
    value = redact_text(value)
    shown = value if value.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in value)
    return shown if limit is None or len(shown) <= limit else f"{shown[: max(0, limit - 3)]}..."


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def hexdump(data: bytes, limit: int) -> list[str]:
    """The first `limit` bytes, 16 a row: offset, hex, what is printable ASCII."""
    rows = []
    for at in range(0, min(len(data), limit), _BYTES_PER_ROW):
        part = data[at : min(at + _BYTES_PER_ROW, limit)]
        text = "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in part)
        rows.append(f"{at:08x}  {part.hex(' '):<47}  {text}")
    return rows


def time_of_id(stream_id: str) -> str:
    """When the server made that id, by its clock: "2026-01-02 03:04:05", UTC; "-" if the id has no time."""
    try:
        return datetime.fromtimestamp(int(stream_id.partition("-")[0]) // 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "-"
