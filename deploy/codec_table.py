"""The figures of `anabranch bench codec` as tables for people.

Invariant: a ratio compares two rows of the same run, and is left empty where there is nothing to compare with.
Held by tests/unit/deploy/test_codec_table.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from anabranch.deploy.bench_codec import Figures

Row = Mapping[str, Any]
OURS, ARC = "anabranch", "arc_v3"


def render(figures: Figures) -> RenderableType:
    """All that was measured of a pair."""
    pair, scan = figures.pair, figures.scan
    changed = pair.changed_elements()
    parts: list[RenderableType] = [
        f"{pair.name}: {pair.elements:,} elements, {changed:,} changed ({changed / pair.elements:.3%}), "
        f"{pair.dense_bytes / 1e6:.1f} MB dense",
        _table(figures.deltas, "bytes /\nchange", "bytes_per_change", ARC),
    ]
    if figures.snapshots:
        parts.append(_table(figures.snapshots, "bytes /\nraw byte", "bytes_per_raw_byte", "zipnn"))
    if scan is not None:
        parts.append(
            f"scan alone: {scan['encode_mb_s']:,.0f} MB/s on one thread, {scan['scan_to_copyto']:.2f} times "
            f"numpy.copyto of the same arrays ({scan['copyto_mb_s']:,.0f} MB/s)"
        )
    return Group(*(piece for part in parts for piece in (part, "")))


def _table(rows: Sequence[Row], size: str, size_key: str, rival: str) -> Table:
    """`rival`: the format that encoding and decoding are compared with, at the same thread count."""
    by_key = {(row["format"], row["threads"]): row for row in rows}
    rivals = any(row["format"] == rival for row in rows)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False)
    table.add_column("format", no_wrap=True)
    ratios = [f"times\n{rival}\nenc / dec"] * rivals + ["times\n1 thread\nenc / dec"]
    for title in ("threads", size, "encode\nMB/s", "decode\nMB/s", *ratios):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            str(row["threads"]),
            f"{row[size_key]:.3f}",
            f"{row['encode_mb_s']:,.0f}",
            f"{row['decode_mb_s']:,.0f}",
        ]
        if rivals:
            cells.append(_ratios(row, by_key.get((rival, row["threads"])), ".1f"))
        cells.append(_ratios(row, by_key.get((row["format"], 1)) if row["threads"] > 1 else None, ".2f"))
        table.add_row(row["format"], *cells, style="bold" if row["format"].startswith(OURS) else None)
    return table


def _ratios(row: Row, other: Row | None, form: str) -> str:
    """How many times faster than `other`, encoding and decoding."""
    if other is None or other is row:
        return ""
    return " / ".join(f"{row[key] / other[key]:{form}}" for key in ("encode_mb_s", "decode_mb_s"))
