"""JSON lines of files that grow, as Arrow tables: each line once, whoever writes meanwhile.

Invariant: `read` gives every whole readable line once, in order, over all calls; a file that was replaced or cut makes the whole
begin anew, which `read` says. Damage of a line costs that line. Held by tests/unit/consumers/test_json_tail.py.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as paj

_BLOCK_BYTES = 16 * 2**20


class JsonTail:
    """Of the columns of `schema`; other keys are passed over, missing ones are null. A string column takes what is no string as
    its JSON."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._at: dict[Path, tuple[int, int]] = {}  # inode, bytes read

    def read(self, paths: Sequence[Path]) -> tuple[bool, Iterator[pa.Table]]:
        """Whether what was read before is void; and what is new, in tables of a bounded size. Raises OSError."""
        again = any(not self._goes_on(path) for path in self._at)
        if again:
            self._at.clear()
        return again, self._tables(paths)

    def _goes_on(self, path: Path) -> bool:
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        return (stat.st_ino, True) == (self._at[path][0], stat.st_size >= self._at[path][1])

    def _tables(self, paths: Sequence[Path]) -> Iterator[pa.Table]:
        for path in paths:
            with path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                at = self._at.get(path, (inode, 0))[1]
                file.seek(at)
                left = b""
                while block := file.read(_BLOCK_BYTES):
                    block = left + block
                    end = block.rfind(b"\n") + 1
                    left = block[end:]
                    if end:
                        yield self.parse(block[:end])
                        at += end
                        self._at[path] = inode, at  # now that it was taken

    def parse(self, lines: bytes) -> pa.Table:
        """The readable ones of `lines`, each of which ends with a newline."""
        options = paj.ParseOptions(explicit_schema=self._schema, unexpected_field_behavior="ignore")
        try:
            return paj.read_json(
                io.BytesIO(lines), paj.ReadOptions(block_size=len(lines) + 1, use_threads=False), options
            ).select(self._schema.names)
        except (pa.ArrowException, KeyError):  # a damaged line, or a value of another type: line by line
            return self._table(_objects(lines.split(b"\n")))

    def _table(self, objects: Iterable[dict[str, Any]]) -> pa.Table:
        rows = list(objects)
        columns = [[_fit(row.get(field.name), field.type) for row in rows] for field in self._schema]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        return pa.table(arrays, schema=self._schema)


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _fit(value: Any, kind: pa.DataType) -> Any:
    """`value` as a column of `kind` takes it; None if it does not."""
    try:
        if value is None:
            return None
        if pa.types.is_string(kind):
            return value if isinstance(value, str) else json.dumps(value)
        if pa.types.is_boolean(kind):
            return value if isinstance(value, bool) else None
        if pa.types.is_integer(kind):
            return value if isinstance(value, int) and abs(value) < 2 ** (kind.bit_width - 1) else None
        return float(value)  # "NaN" and "Infinity" too
    except (TypeError, ValueError, OverflowError):
        return None
