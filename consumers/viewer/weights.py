"""The page of weights: versions and the ways between them, what they cost, and who serves which.

Invariant: a version is shown as versions.jsonl tells of it; who serves it, as the learner last logged. Held by
tests/unit/consumers/test_viewer_steps.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.viewer.charts import Chart, Series

ROWS = 200
_NEWEST = (
    "SELECT epoch, version, label, kind, base_epoch, base, payload_bytes, full_bytes, changed_fraction, result_digest, commit_s, time_ms "
    "FROM versions ORDER BY epoch DESC, version DESC, label LIMIT ?"
)


@dataclass(frozen=True, slots=True)
class WeightsPage:
    """`served`: producer -> policy, as of step `served_at`."""

    versions: list[dict[str, Any]]
    totals: list[dict[str, Any]]
    charts: list[Chart]
    served: dict[str, str]
    served_at: int | None


def weights_page(reader: RunReader) -> WeightsPage:
    last = reader.rows("SELECT step, versions_served FROM steps ORDER BY time_ms DESC LIMIT 1")
    rows = reader.rows(
        "SELECT version, kind, label, payload_bytes, changed_fraction, commit_s FROM versions ORDER BY epoch, version"
    )
    bytes_of: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for row in rows:
        bytes_of[row["kind"]].append((row["version"], row["payload_bytes"]))
    steps = [row for row in rows if row["kind"] == "delta"]
    return WeightsPage(
        versions=reader.rows(_NEWEST, [ROWS]),
        totals=reader.rows(
            "SELECT kind, count(*) AS n, sum(payload_bytes) AS bytes, max(full_bytes) AS full_bytes, avg(commit_s) AS commit_s FROM versions GROUP BY kind ORDER BY kind"
        ),
        charts=[
            Chart("Bytes", [Series(kind, bytes_of[kind]) for kind in sorted(bytes_of)], x="version", unit="bytes", from_zero=True),
            Chart("Changed by a delta", [Series("elements", [(r["version"], r["changed_fraction"]) for r in steps])], x="version", unit="share", from_zero=True),
            Chart("Copy to commit", [Series("seconds", [(r["version"], r["commit_s"]) for r in rows if r["kind"] != "skip"])], x="version", unit="s", from_zero=True),
        ],
        served=json.loads(last[0]["versions_served"] or "{}") if last else {},
        served_at=last[0]["step"] if last else None,
    )  # fmt: skip
