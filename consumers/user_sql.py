"""SQL that a user gives, over the views of a run: it can read the run, and nothing else; and it can change nothing.

Invariant: one statement, of a kind that only reads; no file is opened but those that the views name (DuckDB's own switch, which is
locked and cannot be turned back), nothing is written, installed, attached or fetched, and a query that takes too long or
too much memory is ended. Held by tests/unit/consumers/test_user_sql.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb
import pyarrow as pa

from anabranch.consumers.run_reader import RunReader, words
from anabranch.schemas.errors import DeadlineError, TemporaryError, UsageError

TIMEOUT_S = 60.0
_HINT = "one SELECT (or DESCRIBE, SHOW TABLES, SUMMARIZE) is taken"


@contextmanager
def user_query(
    reader: RunReader, sql: str, *, timeout_s: float = TIMEOUT_S, batch_rows: int = 1024
) -> Iterator[pa.RecordBatchReader]:
    """The rows of `sql`, some at a time. `reader` answers no other query after this: its connection is locked up.

    Raises:
        UsageError: not one statement that only reads; it does not fit the views; it asks for files.
        DeadlineError: it took longer than `timeout_s`.
        TemporaryError: it needs more memory than the reader may take.
    """
    with reader.prepared(sql) as (connection, paths):
        check_statement(connection, sql)
        _lock_up(connection, [str(path) for path in paths])
        late = threading.Event()

        def end() -> None:
            late.set()
            connection.interrupt()

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            with told(late, timeout_s):
                yield connection.sql(sql).to_arrow_reader(batch_rows)
        finally:
            timer.cancel()


def check_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raises UsageError unless `sql` is one statement that only reads."""
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise UsageError(f"{words(error)}; {_HINT}") from error
    if len(statements) != 1:
        raise UsageError(f"{len(statements)} statements were given; {_HINT}")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise UsageError(f"a statement of kind {statements[0].type.name} is not run: {_HINT}")


@contextmanager
def told(late: threading.Event, timeout_s: float) -> Iterator[None]:
    """Errors of DuckDB in this block, as ours."""
    try:
        yield
    except duckdb.InterruptException as error:
        if late.is_set():
            raise DeadlineError.waiting_for("the query", timeout_s, "narrow it, or give --timeout") from error
        raise
    except duckdb.PermissionException as error:
        raise UsageError(f"a query reads the views of the run and no other files: {words(error)}") from error
    except duckdb.OutOfMemoryException as error:
        raise TemporaryError(f"the query needs more memory than it may take: {words(error)}") from error
    except duckdb.IOException as error:
        raise TemporaryError(f"files of the run changed while they were read; ask again: {words(error)}") from error
    except duckdb.Error as error:
        raise UsageError(words(error)) from error


def _lock_up(connection: duckdb.DuckDBPyConnection, paths: list[str]) -> None:
    connection.execute("SET allowed_paths = ?", [paths])
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
