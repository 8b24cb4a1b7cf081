"""Rows of `anabranch bench delivery`, as tables and as JSON, with what counts as kept.

Held by tests/process/test_bench_delivery.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.table import Table

Persistence = Literal["none", "everysec"]
BYTES_TARGET, ROLLOUTS_TARGET = 0.7, 5.0


@dataclass(frozen=True, slots=True)
class BytesRow:
    """MB are 10^6 bytes of payload. `through`: written and read at the same time; ratios are ours over redis-benchmark's, None
    where that is not installed. CPU is that of the writing or reading process alone."""

    persistence: Persistence
    entry_bytes: int
    entries: int
    rounds: int
    per_append: int
    per_read: int
    write_mb_s: float
    read_mb_s: float
    through_mb_s: float
    reader_cpu_ms_per_mb: float
    writer_cpu_ms_per_mb: float
    benchmark_write_mb_s: float | None
    benchmark_read_mb_s: float | None
    benchmark_through_mb_s: float | None
    write_ratio: float | None
    read_ratio: float | None
    through_ratio: float | None
    set_mb_s: float | None
    get_mb_s: float | None

    @property
    def kept(self) -> bool | None:
        return None if self.through_ratio is None else self.through_ratio >= BYTES_TARGET


@dataclass(frozen=True, slots=True)
class RolloutsRow:
    """Rollouts per second of one way; `ours_over_it`: ours over this one, of the same rounds (None for ours)."""

    way: str
    rollouts_per_group: int
    tokens: int
    rollouts: int
    rounds: int
    bytes_per_rollout: int
    write_per_s: float
    read_per_s: float
    both_per_s: float
    reader_cpu_us_per_rollout: float
    ours_over_it: float | None

    @property
    def kept(self) -> bool | None:
        return None if self.ours_over_it is None else self.ours_over_it >= ROLLOUTS_TARGET


def as_json(row: BytesRow | RolloutsRow) -> dict[str, Any]:
    return {**asdict(row), "kept": row.kept}


def bytes_table(rows: Sequence[BytesRow]) -> Table:
    """Ours beside redis-benchmark's; CPU of the reader. SET and GET are in the JSON alone."""
    table = _table(
        "MB/s, ours / redis-benchmark's; through: written and read at the same time",
        ("server", "entry", "write", "read", "through", "ratio", "CPU ms/MB", "kept"),
    )
    for row in rows:
        table.add_row(
            row.persistence, f"{row.entry_bytes / 1024:.0f} KB",
            _against(row.write_mb_s, row.benchmark_write_mb_s), _against(row.read_mb_s, row.benchmark_read_mb_s),
            _against(row.through_mb_s, row.benchmark_through_mb_s), _shown(row.through_ratio),
            _shown(row.reader_cpu_ms_per_mb), _yes(row.kept),
        )  # fmt: skip
    return table


def rollouts_table(rows: Sequence[RolloutsRow]) -> Table:
    table = _table(
        "Rollouts per second, against one message each",
        ("way", "group", "tokens", "bytes", "write/s", "read/s", "both/s", "reader µs", "ours ×", "kept"),
    )
    for row in rows:
        table.add_row(
            row.way, str(row.rollouts_per_group), str(row.tokens), f"{row.bytes_per_rollout:,}", _shown(row.write_per_s),
            _shown(row.read_per_s), _shown(row.both_per_s), _shown(row.reader_cpu_us_per_rollout),
            _shown(row.ours_over_it), _yes(row.kept),
        )  # fmt: skip
    return table


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def _shown(value: float | None) -> str:
    return "—" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _against(ours: float, theirs: float | None) -> str:
    return f"{ours:,.0f} / {'—' if theirs is None else f'{theirs:,.0f}'}"


def _yes(kept: bool | None) -> str:
    return "—" if kept is None else "yes" if kept else "no"
