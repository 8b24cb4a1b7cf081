"""A trajectory payload as an Arrow record batch: version, columns, types, no nulls.

Invariant: the batch that `read_batch` returns has exactly the columns of `SCHEMA`, in its order, valid in Arrow's own terms
and without a null at any depth; its buffers are the payload's. Held by tests/unit/schemas/test_trajectory.py.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from anabranch.schemas.errors import SchemaVersionError, TrajectoryError
from anabranch.schemas.trajectory_schema import SCHEMA, SCHEMA_MAJOR, VERSION_KEY

SCHEMA_MESSAGE = SCHEMA.serialize().to_pybytes()  # an IPC stream: this, a message per batch, and the end mark
ENDS = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_batch(payload: bytes | memoryview) -> pa.RecordBatch:
    """The record batch inside `payload`, without copying its buffers.

    Raises:
        SchemaVersionError: another major version.
        TrajectoryError: not an Arrow stream of exactly one batch with the columns of `SCHEMA`.
    """
    return read_columns(payload)[0]


def read_columns(payload: bytes | memoryview) -> tuple[pa.RecordBatch, list[pa.Array]]:
    """As `read_batch`, with the batch's columns: pyarrow wraps them anew each time they are asked for."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            version = (reader.schema.metadata or {}).get(VERSION_KEY, b"none").decode("ascii", "replace")
            major, _, minor = version.partition(".")
            if major != str(SCHEMA_MAJOR):
                raise SchemaVersionError(
                    f"trajectory schema version {version}; this program reads {SCHEMA_MAJOR}.x: upgrade the older side"
                )
            batches = list(reader)
        if len(batches) != 1:
            raise TrajectoryError(f"an entry holds {len(batches)} record batches; expected 1")
        batch = batches[0]
        exact = batch.schema.equals(SCHEMA)
        if not exact:
            if minor == "0" and "group_size" not in batch.schema.names:  # before 1.1 every group was whole
                whole = np.full(batch.num_rows, batch.num_rows, np.int32)
                batch = batch.append_column(SCHEMA.field("group_size"), pa.array(whole))
            batch = batch.select(SCHEMA.names)
        batch.validate(full=True)
    except (pa.ArrowException, KeyError, OSError) as error:
        raise TrajectoryError(f"payload is not a trajectory batch: {error}") from error
    if not exact:
        for ours, theirs in zip(SCHEMA, batch.schema, strict=True):
            if ours.type != theirs.type:
                raise TrajectoryError(f"column {ours.name} has type {theirs.type}; expected {ours.type}")
    columns: list[pa.Array] = batch.columns
    if batch.num_rows == 0 or any(map(_has_nulls, columns)):
        raise TrajectoryError("a trajectory batch has no rows, or nulls in it")
    return batch, columns


def _has_nulls(column: pa.Array) -> bool:
    """Whether there are nulls in `column` or, for a nested type, inside its values."""
    if column.null_count:
        return True
    if isinstance(column, pa.ListArray):
        # `values` may hold more than the rows refer to: it clears a column, but only the rows' own part condemns one.
        return _has_nulls(column.values) and _has_nulls(column.flatten())
    if isinstance(column, pa.StructArray):
        return any(_has_nulls(column.field(i)) for i in range(column.type.num_fields))
    return False
