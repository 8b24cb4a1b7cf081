"""The figures of `anabranch bench codec` as tables for people.

Invariant: a ratio compares two rows of the same run, and is left empty where there is nothing to compare with.
Held by tests/unit/deploy/test_bench_codec.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        f"{pair.dense_bytes / 1e6:.1f} MB dense; MB/s of dense weights",
        _table(figures.deltas, "bytes\n/ change", "bytes_per_change", ARC),
    ]
    if figures.snapshots:
        parts.append(_table(figures.snapshots, "bytes\n/ raw byte", "bytes_per_raw_byte", "zipnn"))
    if scan is not None:
        parts.append(
            f"scan alone: {scan['encode_mb_s']:,.0f} MB/s on one thread, {scan['scan_to_copyto']:.2f} times "
            f"numpy.copyto of the same arrays ({scan['copyto_mb_s']:,.0f} MB/s)"
        )
    return Group(*parts)


def _table(rows: Sequence[Row], size: str, size_key: str, rival: str) -> Table:
    """`rival`: the format that encoding and decoding are compared with, at the same thread count."""
    by_key = {(row["format"], row["threads"]): row for row in rows}
    table = Table()
    table.add_column("format", no_wrap=True)
    compared = any(row["format"] == rival for row in rows)
    ratios = [f"encode\n/ {rival}", f"decode\n/ {rival}"] if compared else []
    for title in ("threads", size, "encode\nMB/s", "decode\nMB/s", *ratios, "encode\n/ 1 thread", "decode\n/ 1 thread"):
        table.add_column(title, justify="right")
    for row in rows:
        beside, alone = by_key.get((rival, row["threads"])), by_key.get((row["format"], 1))
        cells = [f"{row[size_key]:.3f}", f"{row['encode_mb_s']:,.0f}", f"{row['decode_mb_s']:,.0f}"]
        if compared:
            cells += [_ratio(row, beside, "encode_mb_s"), _ratio(row, beside, "decode_mb_s")]
        single = alone if row["threads"] > 1 else None
        cells += [_ratio(row, single, "encode_mb_s"), _ratio(row, single, "decode_mb_s")]
        style = "bold" if row["format"].startswith(OURS) else None
        table.add_row(row["format"], str(row["threads"]), *cells, style=style)
    return table


def _ratio(row: Row, other: Row | None, key: str) -> str:
    return f"{row[key] / other[key]:.2f}" if other else ""
