"""Groups to Arrow bytes and back, a column at a time.

Invariant: the arrays of a decoded `Group` are read-only views into the payload, and both directions agree with
`trajectory_reference`, down to the bytes and the words of an error: what is not plainly well formed here is given to the
reference, which judges it. Held by tests/property/test_trajectory_codec.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf, isfinite
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.schemas.trajectory_batch import ENDS, SCHEMA_MESSAGE, read_columns
from anabranch.schemas.trajectory_reference import encode_slowly, group_of_batch
from anabranch.schemas.trajectory_schema import SCHEMA, SPAN, Group, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan

_INT32, _INT64, _FLOAT, _DOUBLE = pa.int32(), pa.int64(), pa.float32(), pa.float64()
_INTS, _FLOATS, _SPANS = pa.list_(_INT32), pa.list_(_FLOAT), pa.list_(SPAN)
_CODE = {_INT32: "i", _INT64: "q", _DOUBLE: "d"}
_AT = {name: i for i, name in enumerate(SCHEMA.names)}


def encode_group(group: Group) -> bytes:
    """`group` as one Arrow IPC stream with a single record batch. Raises TrajectoryError if it is not well formed."""
    try:
        columns = _columns_of(group)
    except (AttributeError, OverflowError, TypeError, ValueError):  # a value that does not fit its column
        columns = None
    if columns is None:
        return encode_slowly(group)
    return b"".join((SCHEMA_MESSAGE, pa.RecordBatch.from_arrays(columns, schema=SCHEMA).serialize(), ENDS))


def decode_group(payload: bytes | memoryview) -> Group:
    """The `Group` in `payload`, validated; arrays are read-only views into it.

    Raises:
        SchemaVersionError, TrajectoryError: as `read_batch`, or a rollout that is not well formed.
    """
    batch, columns = read_columns(payload)
    return _group_of(columns) or group_of_batch(batch)


def _columns_of(group: Group) -> list[pa.Array] | None:
    """The columns of a group that is plainly well formed, in the order of `SCHEMA`; None for any other."""
    rows, n = group.rollouts, len(group.rollouts)
    if not 0 < n <= group.group_size:
        return None
    prompt = group.prompt_token_ids
    tokens, logprobs = np.concatenate([r.token_ids for r in rows]), np.concatenate([r.logprobs for r in rows])
    token_ends = _ends(r.token_ids for r in rows)
    span_ends = _ends(r.spans for r in rows)
    spans = [s for r in rows for s in r.spans]
    policies = [s.policy for s in spans]
    epochs, versions, starts = [p.epoch for p in policies], [p.version for p in policies], [s.start for s in spans]
    samples, rewards = [r.sample_index for r in rows], [r.reward for r in rows]
    if (
        (prompt.dtype, tokens.dtype, logprobs.dtype) != _DTYPES
        or prompt.ndim != 1
        or _ends(r.logprobs for r in rows) != token_ends
        or not _indices_are_sound(group.group_index, samples)
        or not _tokens_are_sound(prompt, tokens, token_ends, logprobs, rewards)
        or not _spans_are_sound(span_ends, epochs, versions, starts, token_ends)
    ):
        return None
    span_columns = [_flat(_INT32, epochs), _flat(_INT64, versions), _flat(_INT32, starts)]
    prompts = pa.Array.from_buffers(_INT32, n * len(prompt), [None, pa.py_buffer(prompt.tobytes() * n)])
    return [
        _same_text(group.run, n), _same_text(group.region, n), _same_text(group.producer, n),
        _flat(_INT64, [group.group_index] * n),
        _flat(_INT32, samples),
        _flat(_INT32, [group.attempt] * n),
        _lists(_INTS, array("i", range(0, (n + 1) * len(prompt), len(prompt))), prompts),
        _lists(_INTS, token_ends, pa.Array.from_buffers(_INT32, len(tokens), [None, pa.py_buffer(tokens)])),
        _lists(_FLOATS, token_ends, pa.Array.from_buffers(_FLOAT, len(tokens), [None, pa.py_buffer(logprobs)])),
        _lists(_SPANS, span_ends, pa.Array.from_buffers(SPAN, len(spans), [None], children=span_columns)),
        _flat(_DOUBLE, rewards),
        _texts([r.finish_reason for r in rows]),
        _texts([group.prompt_text] * n), _texts([r.text for r in rows]), _texts([group.answer] * n),
        _flat(_INT64, [r.started_ms for r in rows]), _flat(_INT64, [r.finished_ms for r in rows]),
        _flat(_INT32, [group.group_size] * n),
    ]  # fmt: skip


_DTYPES = (np.dtype(np.int32), np.dtype(np.int32), np.dtype(np.float32))


def _ends(parts: Iterable[Sequence[Any] | NDArray[Any]]) -> array[int]:
    """Arrow's offsets of `parts`, one behind the other: 0, then where each ends."""
    return array("i", accumulate(map(len, parts), initial=0))


def _flat(kind: pa.DataType, values: list[Any]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(array(_CODE[kind], values))])


def _texts(values: list[str]) -> pa.Array:
    encoded = [value.encode() for value in values]
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(_ends(encoded)), pa.py_buffer(b"".join(encoded)))


@lru_cache(maxsize=64)
def _same_text(value: str, n: int) -> pa.Array:
    """For names that hardly change from group to group."""
    return _texts([value] * n)


def _lists(kind: pa.DataType, ends: array[int], values: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(kind, len(ends) - 1, [None, pa.py_buffer(ends)], children=[values])


# The rules of `trajectory_reference.check_rollout`, over all rollouts at once. Numbers per token are left to numpy; those per
# rollout are so few that Python is quicker.


def _indices_are_sound(group_index: int, samples: list[int]) -> bool:
    return group_index >= 0 and min(samples) >= 0


def _tokens_are_sound(
    prompt: NDArray[np.int32],
    tokens: NDArray[np.int32],
    ends: Sequence[int],
    logprobs: NDArray[np.float32],
    rewards: list[float],
) -> bool:
    """A NaN is what `min` and `max` return if there is one, and fails every comparison."""
    return bool(
        len(prompt)
        and tokens.ndim == logprobs.ndim == 1
        and all(a < b for a, b in pairwise(ends))
        and prompt.min() >= 0
        and tokens.min() >= 0
        and logprobs.max() <= 1e-3
        and logprobs.min() > -inf
        and all(map(isfinite, rewards))
    )


def _spans_are_sound(
    ends: Sequence[int], epochs: list[int], versions: list[int], starts: list[int], token_ends: Sequence[int]
) -> bool:
    if len(starts) == len(ends) - 1:  # one each, as almost always
        ordered = list(ends) == list(range(len(ends))) and not any(starts)
    else:
        ordered = all(a < b for a, b in pairwise(ends)) and all(
            starts[first] == 0
            and all(a < b for a, b in pairwise(starts[first:end]))
            and starts[end - 1] < token_ends[i + 1] - token_ends[i]
            for i, (first, end) in enumerate(pairwise(ends))
        )
    return ordered and min(epochs) >= 0 and min(versions) >= 0


def _group_of(columns: Sequence[pa.Array]) -> Group | None:
    """The group in `columns` if it is plainly well formed; None for any other."""
    n = len(columns[0])

    def values(name: str) -> list[Any]:
        found: list[Any] = columns[_AT[name]].to_pylist()
        return found

    constant = {name: values(name) for name in _CONSTANT}
    prompts, prompt_ends = _list_column(columns, "prompt_token_ids")
    tokens, token_ends = _list_column(columns, "token_ids")
    logprobs, logprob_ends = _list_column(columns, "logprobs")
    samples, rewards = values("sample_index"), values("reward")
    span_column = columns[_AT["version_spans"]]
    span_ends = span_column.offsets.to_pylist()
    spans = span_column.values
    epochs, versions, starts = (spans.field(i).to_pylist()[span_ends[0] : span_ends[-1]] for i in range(3))
    if span_ends[0]:
        span_ends = [end - span_ends[0] for end in span_ends]
    prompt = prompts[: prompt_ends[1]]
    if (
        any(found.count(found[0]) != n for found in constant.values())
        or constant["group_size"][0] < n
        or len(set(samples)) != n
        or logprob_ends != token_ends
        or prompt_ends != list(range(0, len(prompts) + 1, max(1, len(prompt))))
        or not (prompts.reshape(n, -1) == prompt).all()
        or not _indices_are_sound(constant["group_index"][0], samples)
        or not _tokens_are_sound(prompt, tokens, token_ends, logprobs, rewards)
        or not _spans_are_sound(span_ends, epochs, versions, starts, token_ends)
    ):
        return None
    made = [VersionSpan(PolicyVersion(e, v), s) for e, v, s in zip(epochs, versions, starts, strict=True)]
    rows = zip(
        samples, pairwise(token_ends), pairwise(span_ends), rewards, values("finish_reason"), values("text"),
        values("started_ms"), values("finished_ms"), strict=True,
    )  # fmt: skip
    return Group(
        **{name: found[0] for name, found in constant.items()},
        prompt_token_ids=prompt,
        rollouts=tuple(
            Rollout(sample, tokens[a:b], logprobs[a:b], tuple(made[c:d]), reward, reason, text, started, finished)
            for sample, (a, b), (c, d), reward, reason, text, started, finished in rows
        ),
    )


_CONSTANT = ("run", "region", "producer", "group_index", "attempt", "prompt_text", "answer", "group_size")


def _list_column(columns: Sequence[pa.Array], name: str) -> tuple[NDArray[Any], list[int]]:
    """The values of a list column as one view, and its offsets into that view."""
    column = columns[_AT[name]]
    ends: list[int] = column.offsets.to_pylist()
    values: NDArray[Any] = column.values.to_numpy()
    if ends[0] or ends[-1] != len(values):  # rows of a larger column
        return values[ends[0] : ends[-1]], [end - ends[0] for end in ends]
    return values, ends
