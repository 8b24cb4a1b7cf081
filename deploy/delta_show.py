"""`anabranch delta show`: what a delta file says, without the weights it applies to.

Invariant: the numbers come from the header and from the chunks, whose digests are checked; the bytes of tensors that share
a chunk are an estimate, by their share of its changed elements. Names are shown and never obeyed. Held by
tests/unit/deploy/test_delta_show.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from anabranch.deploy.delta_progress import progress
from anabranch.deploy.delta_stages import naming
from anabranch.kernels.delta_codec import ChunkInfo, inspect_chunk
from anabranch.kernels.workers import Workers
from anabranch.transport.delta_file import DeltaFile

if TYPE_CHECKING:
    from rich.table import Table

MANY_TENSORS = 40  # from here on layers are shown, unless all tensors are asked for
_LAYER = re.compile(r"^\D*?\b\d+(?=\.)")  # up to the first number that is a part of the name: "model.layers.12"


@dataclass
class Row:
    """One tensor, or the sum of a layer (`dtype` and `shape` empty then)."""

    name: str
    dtype: str
    shape: list[int]
    elements: int
    changed: int
    estimated_bytes: float

    @property
    def density(self) -> float:
        return self.changed / self.elements if self.elements else 0.0


def describe(delta: DeltaFile, *, threads: int) -> dict[str, Any]:
    """Everything that `show` knows of `delta`, ready for JSON. Raises DeltaError if a chunk is damaged."""
    manifest, layout = delta.header.manifest, delta.header.layout
    rows = [
        Row(t.name, t.dtype, list(t.shape), t.numel, changed, 0.0)
        for t, changed in zip(layout.tensors, delta.header.changed, strict=True)
    ]
    sparse = units = 0
    kinds: dict[str, int] = {}
    numbers = range(len(manifest.chunks))
    with progress(f"reading {delta.path.name}", manifest.payload_bytes) as advance, Workers(threads) as workers:
        for chunk, info in zip(manifest.chunks, workers.in_order(lambda n: _inspect(delta, n), numbers), strict=True):
            kinds[info.kind] = kinds.get(info.kind, 0) + 1
            if info.kind == "sparse":
                sparse += info.changed_elements
                units += info.unit_steps
            pieces = [(rows[p.tensor], p.stop - p.start) for p in info.pieces]
            weights = [row.density * size for row, size in pieces]
            for (row, _), weight in zip(pieces, weights, strict=True):
                row.estimated_bytes += chunk.size_bytes * weight / (sum(weights) or 1)
            advance(chunk.size_bytes)
    changed = manifest.changed_elements
    return {
        "file": str(delta.path),
        "kind": manifest.kind,
        **manifest.model_dump(mode="json", exclude={"chunks"}),
        "identity": delta.identity,
        "size_bytes": delta.size_bytes,
        "header_bytes": delta.header_bytes,
        "stages": len(delta.header.stages),
        "chunks": len(manifest.chunks),
        "chunks_by_kind": kinds,
        "density": changed / manifest.total_elements if manifest.total_elements else 0.0,
        "bytes_per_change": delta.size_bytes / changed if changed else None,
        "unit_step_share": units / sparse if sparse else None,  # of `sparse_changes`: dense chunks do not tell
        "sparse_changes": sparse,
        "changed_tensors": sum(1 for row in rows if row.changed),
        "tensors": [{**asdict(row), "density": row.density} for row in rows],
    }


def _inspect(delta: DeltaFile, number: int) -> ChunkInfo:
    chunk = delta.chunk(number)
    with naming(delta, number):
        return inspect_chunk(delta.header.layout, chunk)


def summary(about: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines over the table: what, and its value."""
    anchor = about["kind"] == "anchor"
    full, size = about["full_bytes"], about["size_bytes"]
    change = f"{about['changed_elements']:,} of {about['total_elements']:,} elements ({about['density']:.4%})"
    each = about["bytes_per_change"]
    return [
        ("kind", f"{about['kind']}, codec {printable(about['codec'])}"),
        ("run", f"{printable(about['run'])}, epoch {about['epoch']}"),
        ("version", str(about["version"]) if anchor else f"{about['base']['version']} -> {about['version']}"),
        ("base digest", "none: a full snapshot" if anchor else about["base"]["digest"]),
        ("result digest", about["result_digest"]),
        ("layout", f"{len(about['tensors'])} tensors, hash {about['layout_hash']}"),
        ("size", f"{size:,} bytes, header {about['header_bytes']:,}; dense {full:,}"
                 + (f" ({full / size:,.1f} times as much)" if size else "")),
        ("chunks", f"{about['chunks']}" + (f" in {about['stages']} stages" if about["stages"] > 1 else "")
                   + "".join(f", {count} {kind}" for kind, count in sorted(about["chunks_by_kind"].items()))),
        ("changed", ("everything" if anchor else change + (", added up over the stages" if about["stages"] > 1 else ""))
                    + f", in {about['changed_tensors']} tensors"),
        ("bytes per change", "-" if each is None else f"{each:.3f}"),
        ("steps of one", _unit_steps(about)),
    ]  # fmt: skip


def _unit_steps(about: dict[str, Any]) -> str:
    share, of = about["unit_step_share"], about["sparse_changes"]
    if share is None:
        return "-"
    return f"{share:.2%}" + (f" of {of:,} changes in sparse chunks" if of < about["changed_elements"] else "")


def printable(text: str) -> str:
    """`text` with what a terminal might obey written as Python would."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def rows_to_show(about: dict[str, Any], *, every: bool) -> tuple[str, list[Row]]:
    """What a row of the table is, "tensor" or "layer", and the rows; layers when there are very many tensors.

    In the order of their names, numbers in them by value: layers.2 before layers.10.
    """
    rows = [Row(**{key: value for key, value in row.items() if key != "density"}) for row in about["tensors"]]
    rows.sort(key=lambda row: _by_numbers(row.name))
    if every or len(rows) <= MANY_TENSORS:
        return "tensor", rows
    return "layer", list(_by_layer(rows))


def _by_numbers(name: str) -> list[Any]:
    """Text and numbers in turn. A number by its length and digits: `int` refuses very long ones."""
    parts: list[Any] = re.split("([0-9]+)", name)
    parts[1::2] = [(len(digits), digits) for digits in (part.lstrip("0") for part in parts[1::2])]
    return parts


def _by_layer(rows: Iterable[Row]) -> Iterable[Row]:
    layers: dict[str, Row] = {}
    for row in rows:
        found = _LAYER.match(row.name)
        name = found[0] if found else row.name
        layer = layers.setdefault(name, Row(name, "", [], 0, 0, 0.0))
        layer.elements += row.elements
        layer.changed += row.changed
        layer.estimated_bytes += row.estimated_bytes
    return layers.values()


def table(about: dict[str, Any], *, every: bool) -> Table:
    """A rich table of tensors, or of layers."""
    from rich.table import Table
    from rich.text import Text

    what, rows = rows_to_show(about, every=every)
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column(what, overflow="fold")
    if what == "tensor":
        made.add_column("dtype")
        made.add_column("shape")
    for column in ("changed", "density", "bytes ~", "bytes/change ~"):
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        form = [row.dtype, "x".join(map(str, row.shape)) or "scalar"] if what == "tensor" else []
        each = f"{row.estimated_bytes / row.changed:.2f}" if row.changed else "-"
        made.add_row(
            Text(printable(row.name)),
            *form,
            f"{row.changed:,}",
            f"{row.density:.4%}",
            f"{row.estimated_bytes:,.0f}",
            each,
        )
    return made
