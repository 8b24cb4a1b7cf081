"""A recorded run as tables of SQL: what `anabranch replay` and the viewer read.

Invariant: every query sees the files that count at its beginning, each row once, whatever learner and recorder write, merge and
drop meanwhile (files that go while it runs make it run again over those that took their place). Nothing of the run is
written. Memory is bounded by `memory_bytes`, beyond which DuckDB uses a private folder of the system's temporary ones. Held by
tests/unit/consumers/test_run_reader.py and tests/unit/consumers/test_run_reader_changes.py.

Views and tables: trajectories, fates, steps, evaluations, notes, versions, rollouts, facts (docs/replay.md has the columns).
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow as pa

from anabranch.consumers import run_views
from anabranch.consumers.json_tail import JsonTail
from anabranch.consumers.run_files import FilePart, RunFiles
from anabranch.consumers.run_tables import EVENTS, FACTS, FATES, METRICS, VERSIONS
from anabranch.consumers.stream_rows import STREAM_SCHEMA, StreamRows
from anabranch.schemas.errors import TemporaryError, UsageError
from anabranch.transport.stream import TrajectoryStream

MEMORY_BYTES = 2**30
PATIENCE_S = 5.0  # with files that change under a query: a recorder merges far more seldom
_FACTS_BYTES = 64 * 2**20
VIEWS = ("trajectories", "fates", "steps", "evaluations", "notes", "versions", "rollouts", "facts")


class RunReader:
    """Over a run directory, or over `streams` alone (then `directory` is None). For several threads; one query at a time.

    Args:
        streams: region -> its stream: what is in there and not recorded yet belongs to `trajectories` too. They are read
            without a consumer group, and changed in nothing.
        memory_bytes: of DuckDB; arrows that are handed out are beyond it.
        threads: default: one per CPU.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        streams: Mapping[str, TrajectoryStream] | None = None,
        memory_bytes: int = MEMORY_BYTES,
        threads: int | None = None,
        max_entry_bytes: int = 16 * 2**20,
    ) -> None:
        self.directory = directory
        self._files = RunFiles(directory) if directory is not None else None
        self._spill = Path(tempfile.mkdtemp(prefix="anabranch-replay-"))
        self._connection = duckdb.connect(
            config={
                "memory_limit": f"{memory_bytes}B",
                "threads": threads or os.cpu_count() or 1,
                "temp_directory": str(self._spill),
                "python_enable_replacements": False,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )
        self._lock = threading.RLock()
        self._fates, self._metrics, self._versions = JsonTail(FATES), JsonTail(METRICS), JsonTail(VERSIONS)
        self._streams = StreamRows(streams, max_entry_bytes=max_entry_bytes) if streams else None
        self._shape: object = None
        self._facts_seen: dict[Path, None] = {}
        self._make_tables()

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """All rows of `sql`, which reads the views.

        Raises:
            UsageError: DuckDB refuses it.
            TemporaryError: files kept changing under it.
        """
        with self._lock:
            return self._retrying(sql, lambda: self._connection.sql(sql, params=list(parameters)).to_arrow_table())

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """As `query`, as Python objects."""
        found: list[dict[str, Any]] = self.query(sql, parameters).to_pylist()
        return found

    @contextmanager
    def batches(
        self, sql: str, parameters: Sequence[Any] = (), *, batch_rows: int = 4096
    ) -> Iterator[pa.RecordBatchReader]:
        """As `query`, some rows at a time; other threads wait until the block is left."""
        with self._lock:
            yield self._retrying(
                sql, lambda: self._connection.sql(sql, params=list(parameters)).to_arrow_reader(batch_rows)
            )

    @contextmanager
    def prepared(self, sql: str) -> Iterator[tuple[duckdb.DuckDBPyConnection, list[Path]]]:
        """The connection with the views that `sql` names up to date, and the files that they read: for `user_sql`."""
        with self._lock:
            yield self._connection, self._refresh(sql)

    def close(self) -> None:
        with self._lock:
            self._connection.close()
            shutil.rmtree(self._spill, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _retrying(self, sql: str, run: Any) -> Any:
        last: Exception | None = None
        end_s = time.monotonic() + PATIENCE_S
        while last is None or time.monotonic() < end_s:
            try:
                self._refresh(sql)
                return run()
            except (duckdb.IOException, FileNotFoundError) as error:  # merged or dropped under it: look again
                last = error
            except duckdb.InvalidInputException as error:  # written over while it was read
                if "parquet" not in str(error).lower():
                    raise UsageError(words(error)) from error
                last = error
            except duckdb.OutOfMemoryException as error:
                raise TemporaryError(f"the query needs more memory than it may take: {words(error)}") from error
            except duckdb.Error as error:
                raise UsageError(words(error)) from error
        raise TemporaryError(
            f"the files of {self.directory} changed for {PATIENCE_S:.0f} s whenever they were read: {words(last)}; if nobody writes "
            "there, one of them is damaged"
        ) from last

    def _make_tables(self) -> None:
        self._connection.execute("CREATE SCHEMA log")  # what SHOW TABLES need not show
        for name, schema in (("fates", FATES), ("log.metrics", METRICS), ("versions", VERSIONS), ("facts", FACTS)):
            self._connection.execute(_create(name, run_views.arrow_columns(schema)))
        for name, (event, schema) in EVENTS.items():
            columns = ", ".join(schema.names)
            self._connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM log.metrics WHERE event = '{event}'")
        if self._streams is not None:
            self._connection.register("_arrow", STREAM_SCHEMA.empty_table())
            self._connection.execute(f"CREATE TABLE {run_views.STREAM_TABLE} AS FROM _arrow")
            self._connection.unregister("_arrow")

    def _refresh(self, sql: str) -> list[Path]:
        """Bring up to date what `sql` names; the files that its views read. Raises OSError, StreamUnavailableError."""
        named = set(re.findall(r"[a-z_]+", sql.lower()))
        parts: list[FilePart] = []
        ranks: list[Path] = []
        if self._streams is not None and "trajectories" in named and (new := self._streams.read()) is not None:
            self._append(run_views.STREAM_TABLE, new)
        if self._files is not None:
            if "trajectories" in named:
                parts = self._files.trajectories()
            unsettled = self._streams is not None or not all(part.settled for part in parts)
            joined = "trajectories" in named and unsettled
            if joined or "rollouts" in named:
                ranks = self._files.ranks()
            if joined or "fates" in named:
                self._follow("fates", self._fates, self._files.fates())
            if named & EVENTS.keys():
                self._follow("log.metrics", self._metrics, self._files.metrics())
            if "versions" in named:
                self._follow("versions", self._versions, self._files.versions())
            if "facts" in named:
                self._read_facts()
        shape = (tuple(parts), tuple(ranks))
        if shape != self._shape:
            views = {
                "rollouts": run_views.rollouts_view(ranks),
                "trajectories": run_views.trajectories_view(
                    parts, stream=self._streams is not None, rollouts=bool(ranks)
                ),
            }
            for name, select in views.items():
                self._connection.execute(f"CREATE OR REPLACE VIEW {name} AS {select}")
            self._shape = shape
        return [*(part.file.path for part in parts), *ranks]

    def _follow(self, table: str, tail: JsonTail, paths: Sequence[Path]) -> None:
        again, new = tail.read(paths)
        if again:
            self._connection.execute(f"DELETE FROM {table}")
        for rows in new:
            self._append(table, rows)

    def _read_facts(self) -> None:
        assert self._files is not None
        places = [place.folder / "facts.json" for place in self._files.steps()]
        fresh = [path for path in places if path not in self._facts_seen]
        if any(path not in set(places) for path in self._facts_seen):
            self._connection.execute("DELETE FROM facts")
            self._facts_seen, fresh = {}, places
        for path in fresh:
            with path.open("rb") as file:
                text = file.read(_FACTS_BYTES)
            self._append("facts", JsonTail(FACTS).parse(b" ".join(text.split(b"\n")) + b"\n"))
            self._facts_seen[path] = None

    def _append(self, table: str, rows: pa.Table) -> None:
        self._connection.register("_arrow", rows)
        self._connection.execute(f"INSERT INTO {table} FROM _arrow")
        self._connection.unregister("_arrow")


def words(error: Exception) -> str:
    """What DuckDB says, without the quoted line of the query."""
    return str(error).partition("\n\nLINE")[0].replace("\n", " ").strip()


def _create(name: str, columns: Mapping[str, str]) -> str:
    return f"CREATE TABLE {name} ({', '.join(f'{column} {kind}' for column, kind in columns.items())})"
