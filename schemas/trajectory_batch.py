"""A trajectory payload as an Arrow record batch: version, columns, types, no nulls.

Invariant: the batch that `read_batch` returns has exactly the columns of `SCHEMA`, in its order, valid in Arrow's own terms
and without a null at any depth; its buffers are the payload's. Held by tests/unit/schemas/test_trajectory.py.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from anabranch.schemas.errors import SchemaVersionError, TrajectoryError
from anabranch.schemas.trajectory_frame import SCHEMA_MESSAGE, find_frame
from anabranch.schemas.trajectory_schema import SCHEMA, SCHEMA_MAJOR, VERSION_KEY

_TIMES = ("permit_ms", "scored_ms", "spooled_ms")
_ADDED = {"0": ("group_size", *_TIMES), "1": _TIMES}  # minor version -> columns that came after it


def read_batch(payload: bytes | memoryview) -> pa.RecordBatch:
    """The record batch inside `payload`, without copying its buffers.

    Raises:
        SchemaVersionError: another major version.
        TrajectoryError: not an Arrow stream of exactly one batch with the columns of `SCHEMA`.
    """
    return _read_framed(payload) or read_any(payload)


def _read_framed(payload: bytes | memoryview) -> pa.RecordBatch | None:
    """The quick way for what our own writer left; None for all others, good or bad. There is no validity in a frame, hence no null."""
    if find_frame(payload) is None:
        return None
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload).slice(len(SCHEMA_MESSAGE)), SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, OSError):
        return None
    return batch


def read_any(payload: bytes | memoryview) -> pa.RecordBatch:
    """As `read_batch`, by Arrow's own reader of streams."""
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
        for name in _ADDED.get(minor, ()):
            if name not in batch.schema.names:
                held = batch.num_rows if name == "group_size" else 0  # every group was whole; a time is not known
                column = np.full(batch.num_rows, held, SCHEMA.field(name).type.to_pandas_dtype())
                batch = batch.append_column(SCHEMA.field(name), pa.array(column))
        batch = batch.select(SCHEMA.names)
        batch.validate(full=True)
    except (pa.ArrowException, KeyError, OSError) as error:
        raise TrajectoryError(f"payload is not a trajectory batch: {error}") from error
    for ours, theirs in zip(SCHEMA, batch.schema, strict=True):
        if ours.type != theirs.type:
            raise TrajectoryError(f"column {ours.name} has type {theirs.type}; expected {ours.type}")
    if batch.num_rows == 0 or any(map(_has_nulls, batch.columns)):
        raise TrajectoryError("a trajectory batch has no rows, or nulls in it")
    return batch


def _has_nulls(column: pa.Array) -> bool:
    """Whether there are nulls in `column` or, for a nested type, inside its values."""
    if column.null_count:
        return True
    if pa.types.is_nested(column.type):
        inner = column.flatten()
        return any(map(_has_nulls, inner if isinstance(inner, list) else [inner]))
    return False
