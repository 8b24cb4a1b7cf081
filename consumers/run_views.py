"""The SQL of the views over a recorded run: `trajectories` over files of any age, with what the run knows of each row joined.

Invariant: a view has the columns of its table here, in this order and of these types, whatever files there are, none included; a
column that a file lacks is null, or computed where the file has what it takes. A row whose file knows its fate already is
given as it stands; to the others the fate log and the records of steps are joined. Held by
tests/unit/consumers/test_run_views.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from anabranch.consumers.run_files import FilePart

SPANS = "STRUCT(epoch INTEGER, version BIGINT, start INTEGER)[]"
# As the recorder writes them; `run`, `region` and `epoch` may be in a file's path instead.
STORED = {
    "run": "VARCHAR", "region": "VARCHAR", "producer": "VARCHAR", "seq": "BIGINT", "sample_index": "INTEGER",
    "group_index": "BIGINT", "attempt": "INTEGER", "entry_id": "VARCHAR", "epoch": "INTEGER", "epoch_min": "INTEGER",
    "version_min": "BIGINT", "version_max": "BIGINT", "tokens": "INTEGER", "reward": "DOUBLE", "finish_reason": "VARCHAR",
    "group_size": "INTEGER", "permit_ms": "BIGINT", "started_ms": "BIGINT", "finished_ms": "BIGINT", "scored_ms": "BIGINT",
    "spooled_ms": "BIGINT", "delivered_ms": "BIGINT", "admitted_ms": "BIGINT", "fate": "VARCHAR", "fate_time_ms": "BIGINT",
    "step": "BIGINT", "train_epoch": "INTEGER", "train_version": "BIGINT", "age": "INTEGER", "advantage": "DOUBLE",
    "weight": "DOUBLE", "ratio_mean": "FLOAT", "ratio_max": "FLOAT", "kept_fraction": "FLOAT", "loss_share": "DOUBLE",
    "prompt_text": "VARCHAR", "text": "VARCHAR", "answer": "VARCHAR", "prompt_token_ids": "INTEGER[]",
    "token_ids": "INTEGER[]", "logprobs": "FLOAT[]", "version_spans": SPANS, "learner_logprobs": "FLOAT[]",
    "entropy": "FLOAT[]", "factor": "FLOAT[]", "kept": "BOOLEAN[]",
}  # fmt: skip
_COMPUTED = {
    "group_size": "1",
    "tokens": "len(token_ids)",
    "epoch": "list_max(list_transform(version_spans, lambda s: s.epoch))",
    "epoch_min": "list_min(list_transform(version_spans, lambda s: s.epoch))",
    "version_min": "list_min(list_transform(version_spans, lambda s: s.version))",
    "version_max": "list_max(list_transform(version_spans, lambda s: s.version))",
}
_NOT_KNOWN = ("permit_ms", "scored_ms", "spooled_ms")  # 0 in what older producers sent
_PARTITION = {"run": "VARCHAR", "epoch": "INTEGER", "day": "VARCHAR", "region": "VARCHAR"}
# Column -> from the fate log (f) or the records of steps (r), where the file has none.
_JOINED = {
    "fate": "f.fate", "fate_time_ms": "f.time_ms", "delivered_ms": "f.delivered_ms", "admitted_ms": "f.admitted_ms", "train_epoch": "f.epoch", "train_version": "f.version", "age": "f.age",
    "step": "CASE WHEN f.fate IN ('trained', 'dropped:zero_variance', 'dropped:gate') THEN f.version + 1 END",
    "advantage": "r.advantage", "weight": "r.weight", "ratio_mean": "r.ratio_mean", "ratio_max": "r.ratio_max",
    "kept_fraction": "r.kept_fraction", "loss_share": "r.loss_share", "learner_logprobs": "r.logprob",
    "entropy": "r.entropy", "factor": "r.factor", "kept": "r.kept",
}  # fmt: skip
ROLLOUTS = {
    "epoch": "INTEGER", "step": "BIGINT", "region": "VARCHAR", "producer": "VARCHAR", "seq": "BIGINT",
    "group_index": "BIGINT", "sample_index": "INTEGER", "row": "INTEGER", "update": "INTEGER", "advantage": "DOUBLE",
    "weight": "DOUBLE", "tokens": "INTEGER", "age_max": "INTEGER", "ratio_mean": "FLOAT", "ratio_max": "FLOAT",
    "kept_fraction": "FLOAT", "loss_share": "DOUBLE", "applied": "BOOLEAN", "logprob": "FLOAT[]", "proximal": "FLOAT[]",
    "entropy": "FLOAT[]", "factor": "FLOAT[]", "kept": "BOOLEAN[]",
}  # fmt: skip
# What a row is called and when it was appended: the end of every view of trajectories.
_NAMED = (
    "url_encode(region) || '/' || url_encode(producer) || '/' || seq || '/' || sample_index AS id",
    "url_encode(region) || '/' || url_encode(producer) || '/' || seq AS group_id",
    "TRY_CAST(split_part(entry_id, '-', 1) AS BIGINT) AS appended_ms",
)
TRAJECTORY_COLUMNS = ("id", "group_id", "appended_ms", *STORED)
STREAM_TABLE = "log.stream_rows"


def trajectories_view(parts: Sequence[FilePart], *, stream: bool, rollouts: bool) -> str:
    """SELECT of the view. `stream`: there is a table `STREAM_TABLE` of rows of streams, with columns of the wire; `rollouts`: a view
    `rollouts` to join. A view `fates` is there if a part is not settled, or with `stream`."""
    alike: dict[tuple[frozenset[str], bool, bool], list[Path]] = defaultdict(list)
    for part in parts:
        alike[part.columns, part.partitioned, part.settled].append(part.file.path)
    settled = [_files(paths, have, cut) for (have, cut, done), paths in alike.items() if done]
    others = [_files(paths, have, cut) for (have, cut, done), paths in alike.items() if not done]
    if stream:
        recorded = settled + others
        rows = _stored(STREAM_TABLE, frozenset(STORED) - {*_JOINED, *_COMPUTED} | {"group_size"})
        if recorded:  # what is recorded by now counts as recorded
            known = " UNION ALL ".join(f"SELECT region, producer, seq FROM ({one})" for one in recorded)
            rows = f"SELECT s.* FROM ({rows}) s ANTI JOIN ({known}) k USING (region, producer, seq)"
        others = [*others, rows]
    unions = [*settled, *([_joined(" UNION ALL ".join(others), rollouts)] if others else [])]
    named = ", ".join(_NAMED)
    return f"SELECT {named}, * FROM ({' UNION ALL '.join(unions) or empty(STORED)})"


def rollouts_view(paths: Sequence[Path]) -> str:
    """SELECT over the per-rank files of the records of steps; epoch and step are in their paths."""
    if not paths:
        return empty(ROLLOUTS)
    listed = ", ".join(
        f"TRY_CAST({name} AS {kind}) AS {name}" for name, kind in ROLLOUTS.items() if name not in ("epoch", "step")
    )
    # union_by_name with one typed empty relation: a column of a later version of the program may lack in some
    return (
        f"SELECT epoch, TRY_CAST(regexp_extract(filename, '([0-9]+)/rank-[0-9]+.parquet$', 1) AS BIGINT) AS step, {listed} FROM "
        f"(SELECT * FROM read_parquet({paths_sql(paths)}, union_by_name = true, filename = true, hive_partitioning = true, "
        f"hive_types = {{'epoch': INTEGER}}) UNION ALL BY NAME {empty(ROLLOUTS)})"
    )


def paths_sql(paths: Iterable[Path]) -> str:
    return f"[{', '.join(quoted(str(path)) for path in paths)}]"


def quoted(text: str) -> str:
    """`text` as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def empty(columns: dict[str, str]) -> str:
    """SELECT of no rows with these columns."""
    return f"SELECT {', '.join(f'NULL::{kind} AS {name}' for name, kind in columns.items())} WHERE false"


def arrow_columns(schema: pa.Schema) -> dict[str, str]:
    """The types that a table of these Arrow columns has."""
    kinds = {
        pa.string(): "VARCHAR",
        pa.int64(): "BIGINT",
        pa.int32(): "INTEGER",
        pa.float64(): "DOUBLE",
        pa.bool_(): "BOOLEAN",
    }
    return {field.name: kinds[field.type] for field in schema}


def _files(paths: Sequence[Path], have: frozenset[str], partitioned: bool) -> str:
    keys = _PARTITION if partitioned else {"region": "VARCHAR"}
    kinds = ", ".join(f"'{key}': {kind}" for key, kind in keys.items())
    source = f"read_parquet({paths_sql(paths)}, hive_partitioning = true, hive_types = {{{kinds}}})"
    return _stored(source, have | keys.keys())


def _stored(source: str, have: frozenset[str]) -> str:
    """SELECT of the columns of `STORED` from a source that has `have` of them."""

    def column(name: str, kind: str) -> str:
        if name in have:
            return f"{f'nullif({name}, 0)' if name in _NOT_KNOWN else name}::{kind} AS {name}"
        return f"({_COMPUTED.get(name, 'NULL')})::{kind} AS {name}"

    return f"SELECT {', '.join(column(name, kind) for name, kind in STORED.items())} FROM {source}"


def _joined(rows: str, rollouts: bool) -> str:
    """SELECT of the columns of `STORED` from `rows`, with the fate log and the records of steps where a row has no fate."""
    known = {name: value for name, value in _JOINED.items() if rollouts or not value.startswith("r.")}
    columns = ", ".join(
        f"coalesce(t.{name}, {known[name]})::{kind} AS {name}" if name in known else f"t.{name}"
        for name, kind in STORED.items()
    )
    text = f"SELECT {columns} FROM ({rows}) t LEFT JOIN fates f ON t.region = f.region AND t.producer = f.producer AND t.seq = f.seq"
    if rollouts:
        text += (
            " LEFT JOIN (SELECT * FROM rollouts QUALIFY row_number() OVER"
            " (PARTITION BY epoch, step, region, producer, seq, sample_index ORDER BY update) = 1) r"
            " ON t.region = r.region AND t.producer = r.producer AND t.seq = r.seq AND t.sample_index = r.sample_index"
            " AND r.epoch = f.epoch AND r.step = f.version + 1"
        )
    return text
