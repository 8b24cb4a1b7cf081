"""A user's SQL reads the run, and nothing else, and changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.user_sql import user_query
from anabranch.schemas.errors import DeadlineError, UsageError
from tests.replay_runs import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "secret.csv").write_text("password\nhunter2\n")
    return write_run(tmp_path / "run")


def ask(directory: Path, sql: str, **options: float) -> list[dict]:
    with RunReader(directory) as reader, user_query(reader, sql, **options) as batches:
        return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT fate, count(*) AS n FROM trajectories GROUP BY ALL", 5),
        ("FROM trajectories JOIN fates USING (region, producer, seq)", 12),
        ("WITH t AS (SELECT step FROM trajectories) SELECT DISTINCT step FROM t WHERE step IS NOT NULL", 2),
        ("SELECT loss FROM facts JOIN rollouts USING (epoch, step)", 8),
        ("DESCRIBE trajectories", 49),
        ("SUMMARIZE fates", 16),
        ("SHOW TABLES", 8),
        ("SELECT 1;", 1),
    ],
)
def test_it_reads_the_views(run: Path, sql: str, rows: int) -> None:
    assert len(ask(run, sql)) == rows


FOREIGN = [
    "SELECT * FROM read_csv('{root}/secret.csv')",
    "SELECT * FROM '{root}/secret.csv'",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_blob('{root}/run/resolved.toml')",
    "SELECT * FROM glob('{root}/*')",
    "SELECT * FROM read_parquet('{root}/run/trajectories/*/*.parquet')",
    "SELECT * FROM 'http://127.0.0.1:9/x.parquet'",
    "SELECT * FROM sqlite_scan('{root}/x.db', 't')",
    "SELECT getenv('HOME')",
    "FROM duckdb_secrets() WHERE load_aws_credentials() IS NULL",
]
WRITING = [
    "COPY trajectories TO '{root}/out.csv'",
    "COPY (SELECT 1) TO '{file}' (FORMAT parquet, USE_TMP_FILE false)",
    "EXPLAIN ANALYZE COPY trajectories TO '{root}/out.csv'",
    "FROM query('COPY trajectories TO ''{root}/out.csv''')",
    "EXPORT DATABASE '{root}/db'",
    "ATTACH '{root}/x.db'",
    "CREATE TABLE t AS SELECT 1",
    "INSERT INTO fates SELECT * FROM fates",
    "DELETE FROM fates",
    "DROP VIEW trajectories",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "PRAGMA enable_profiling",
    "CALL pragma_version()",
    "SELECT 1; COPY trajectories TO '{root}/out.csv'",
    "",
    "nonsense",
]


@pytest.mark.parametrize("sql", FOREIGN + WRITING)
def test_it_reads_nothing_else_and_changes_nothing(run: Path, sql: str) -> None:
    file = next(run.rglob("*.parquet"))
    before = {p: p.stat().st_mtime_ns for p in run.parent.rglob("*")}
    with pytest.raises(UsageError):
        ask(run, sql.format(root=run.parent, file=file))
    assert {p: p.stat().st_mtime_ns for p in run.parent.rglob("*")} == before


def test_variables_of_the_program_are_no_tables(run: Path) -> None:
    secrets = [1, 2, 3]
    assert secrets
    with pytest.raises(UsageError):
        ask(run, "SELECT * FROM secrets")


def test_a_query_that_takes_too_long_is_ended(run: Path) -> None:
    with pytest.raises(DeadlineError, match="gave up after"):
        ask(
            run,
            "SELECT count(*) FROM range(10000000000) a, range(1000000) b WHERE hash(a.range + b.range) % 7 = 3",
            timeout_s=0.5,
        )


def test_after_a_query_nothing_of_it_is_left(run: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    ask(run, "SELECT count(*) FROM trajectories")
    assert set(os.listdir("/proc/self/fd")) <= before
