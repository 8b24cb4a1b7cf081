"""A trajectory payload as an Arrow record batch: version, columns, types, no nulls.

Invariant: the batch that `read_batch` returns has exactly the columns of `SCHEMA`, in its order, valid in Arrow's own terms
and without a null at any depth; its buffers are the payload's. Held by tests/unit/schemas/test_trajectory.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import pyarrow as pa

from anabranch.schemas.errors import SchemaVersionError, TrajectoryError
from anabranch.schemas.trajectory_schema import SCHEMA, SCHEMA_MAJOR, VERSION_KEY

SCHEMA_MESSAGE = SCHEMA.serialize().to_pybytes()  # an IPC stream: this, a message per batch, and the end mark
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """A batch as our own writer leaves it. `buffers`: of all columns in the order of `SCHEMA`, children behind their parents,
    each beginning with its validity, which is None here; rows begin at the first element of each."""

    batch: pa.RecordBatch
    buffers: list[pa.Buffer]


def read_batch(payload: bytes | memoryview) -> pa.RecordBatch:
    """The record batch inside `payload`, without copying its buffers.

    Raises:
        SchemaVersionError: another major version.
        TrajectoryError: not an Arrow stream of exactly one batch with the columns of `SCHEMA`.
    """
    plain = read_plain(payload)
    return plain.batch if plain else _read_any(payload)


def read_plain(payload: bytes | memoryview) -> PlainBatch | None:
    """The batch if it is one that our own writer of this version could have left; None for all others, good or bad."""
    head = len(SCHEMA_MESSAGE)
    if payload[:head] != SCHEMA_MESSAGE:
        return None
    whole = pa.py_buffer(payload)
    try:
        batch = pa.ipc.read_record_batch(whole.slice(head), SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, EOFError, OSError):
        return None
    buffers = batch.to_struct_array().buffers()
    if batch.num_rows == 0 or any(_validity_of(buffers)):  # an empty one marks nothing
        return None
    last = buffers[-1]
    behind = -(-(last.address + last.size - whole.address) // 8) * 8  # a body is padded to 8 bytes
    if payload[behind:] != END_OF_STREAM:  # or there is more than this batch
        return None
    return PlainBatch(batch, buffers)


def _validity_buffers(kind: pa.DataType, at: int) -> tuple[list[int], int]:
    """Where among the buffers of an array of type `kind`, the first of which is at `at`, validity stands; and one past the last."""
    if pa.types.is_struct(kind):
        found, end = [at], at + 1
        for field in kind:
            inner, end = _validity_buffers(field.type, end)
            found += inner
        return found, end
    if pa.types.is_list(kind):
        inner, end = _validity_buffers(kind.value_type, at + 2)
        return [at, *inner], end
    return [at], at + (3 if pa.types.is_string(kind) else 2)


_validity_of = itemgetter(*_validity_buffers(pa.struct(list(SCHEMA)), 0)[0])


def _read_any(payload: bytes | memoryview) -> pa.RecordBatch:
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
        if minor == "0" and "group_size" not in batch.schema.names:  # before 1.1 every group was whole
            whole = np.full(batch.num_rows, batch.num_rows, np.int32)
            batch = batch.append_column(SCHEMA.field("group_size"), pa.array(whole))
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
