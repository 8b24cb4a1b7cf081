"""`anabranch bench paths`: what a follower that is n versions behind fetches, on the channel that a run has left.

Invariant: every pair of versions n apart is planned, none is left out, by the planner that followers use; the run's data is
copied, not touched. Held by tests/unit/deploy/test_bench_paths.py.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from anabranch.schemas.errors import ConfigError, ManifestError
from anabranch.schemas.keys import Keys
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.weight_path import State, cheapest_path, fetch_limit, path_bytes


@dataclass(frozen=True, slots=True)
class Row:
    """Over all pairs of versions `behind` apart. Fractions are bytes of the path over bytes of the chain of single deltas."""

    behind: int
    pairs: int
    fetches_max: int
    fetches_allowed: int
    of_chain_median: float
    of_chain_max: float


def index_of_run(run_directory: Path) -> list[IndexEntry]:
    """The index of a run that kept its servers' data (`anabranch demo --keep-redis`), by a server over a copy of it.

    Raises:
        ConfigError: no such data, or nothing on its channel.
    """
    data = run_directory / "redis" / "hub"
    if not data.is_dir():
        raise ConfigError(f"{data} is not there: run the demo with --keep-redis, and name its run directory")
    with tempfile.TemporaryDirectory(prefix="anabranch-paths-") as aside:
        shutil.copytree(data, Path(aside) / "hub")
        with EmbeddedValkey(Path(aside) / "hub") as server:
            client = connect(server.url, deadline_s=10, what="a server over the run's data")
            channel = RedisWeightChannel(client, Keys(run_directory.resolve().name))
            try:
                entries = channel.index()
            finally:
                channel.close()
    if not entries:
        raise ConfigError(f"run {run_directory.resolve().name} left nothing on its weight channel")
    return entries


def measure(entries: Sequence[IndexEntry]) -> list[Row]:
    """A row for every n = 1, 2, 4, ... that two versions of the newest epoch are apart.

    Raises:
        ManifestError: the chain of single deltas is not whole (retention has dropped some of it).
    """
    epoch = max(entry.policy.epoch for entry in entries)
    digests = {entry.policy: entry.digest for entry in entries if entry.policy.epoch == epoch}
    deltas = {entry.policy: entry.payload_bytes for entry in entries if entry.label == "delta"}
    versions = sorted(policy.version for policy in digests)
    rows, behind = [], 1
    while behind <= versions[-1] - versions[0]:
        fetches, shares = [], []
        for version in versions:
            start, goal = PolicyVersion(epoch, version), PolicyVersion(epoch, version + behind)
            if goal not in digests:
                continue
            path = cheapest_path(entries, State(start, digests[start]), goal)
            steps = [deltas.get(PolicyVersion(epoch, v)) for v in range(version + 1, goal.version + 1)]
            if path is None or None in steps:
                raise ManifestError(f"the chain from {start} to {goal} is not whole any more")
            fetches.append(len(path))
            shares.append(path_bytes(path) / max(1, sum(step or 0 for step in steps)))
        rows.append(Row(behind, len(fetches), max(fetches), _allowed(behind), statistics.median(shares), max(shares)))
        behind *= 2
    return rows


def _allowed(behind: int) -> int:
    return fetch_limit([IndexEntry(PolicyVersion(0, behind), "skip", PolicyVersion(0, 0), 0, 0, "")])


def table(rows: Sequence[Row]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    for name in ("versions behind", "pairs", "fetches, most", "2 log2 n + 2", "bytes of chain, median", "most"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            str(row.behind), str(row.pairs), str(row.fetches_max), str(row.fetches_allowed),
            f"{row.of_chain_median:.2f}", f"{row.of_chain_max:.2f}",
        )  # fmt: skip
    return shown


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
