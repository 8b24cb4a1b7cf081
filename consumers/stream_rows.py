"""What is in the streams of a run, as rows of trajectories: looked at, and changed in nothing.

Invariant: an entry is read once, in order, whoever else reads the stream; entries that nobody can read are counted and passed over;
at most `MAX_BYTES` of a run are taken, the oldest first, and what is left out is told. A region that is away is named, and the
others are read. Held by tests/unit/consumers/test_stream_rows.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from anabranch.consumers.recorded_rows import named
from anabranch.schemas.envelope import open_envelope
from anabranch.schemas.errors import AnabranchError, WireError
from anabranch.schemas.trajectory import SCHEMA, read_batch
from anabranch.transport.stream import TrajectoryStream

MAX_BYTES = 256 * 2**20
_PAGE = 256
STREAM_SCHEMA = pa.schema([*SCHEMA, pa.field("entry_id", pa.string()), pa.field("seq", pa.int64())])


class StreamRows:
    """`unreadable`: region -> entries passed over; `away`: region -> why it could not be read; `left_out`: regions that hold more
    than is taken."""

    def __init__(
        self, streams: Mapping[str, TrajectoryStream], *, max_entry_bytes: int, max_bytes: int = MAX_BYTES
    ) -> None:
        self._streams = dict(streams)
        self._max_entry_bytes, self._left_bytes = max_entry_bytes, max_bytes
        self._after = dict.fromkeys(self._streams, "0-0")
        self.unreadable = dict.fromkeys(self._streams, 0)
        self.away: dict[str, str] = {}
        self.left_out: set[str] = set()

    def read(self) -> pa.Table | None:
        """Rows of entries that are new since the last call, None if there are none."""
        found: list[pa.RecordBatch] = []
        self.left_out.clear()
        for region, stream in self._streams.items():
            try:
                found += self._region(region, stream)
                self.away.pop(region, None)
            except AnabranchError as error:
                self.away[region] = str(error)
        return pa.Table.from_batches(found, STREAM_SCHEMA) if found else None

    def _region(self, region: str, stream: TrajectoryStream) -> list[pa.RecordBatch]:
        found: list[pa.RecordBatch] = []
        while page := stream.look(after_id=self._after[region], max_entries=_PAGE):
            for entry in page:
                if self._left_bytes <= 0:
                    self.left_out.add(region)
                    return found
                self._after[region] = entry.entry_id
                try:
                    envelope = open_envelope(entry.fields, max_entry_bytes=self._max_entry_bytes)
                    batch = named(read_batch(envelope.payload), envelope.producer)
                except WireError:
                    self.unreadable[region] += 1
                    continue
                self._left_bytes -= len(envelope.payload)
                rows = batch.num_rows
                columns = [
                    *batch.columns,
                    pa.array([entry.entry_id] * rows),
                    pa.array([envelope.seq] * rows, pa.int64()),
                ]
                found.append(pa.RecordBatch.from_arrays(columns, schema=STREAM_SCHEMA))
        return found
