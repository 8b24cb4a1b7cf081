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
from operator import lt
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.schemas.trajectory_batch import read_batch
from anabranch.schemas.trajectory_columns import Columns
from anabranch.schemas.trajectory_frame import END_OF_STREAM, SCHEMA_MESSAGE, Frame, find_frame
from anabranch.schemas.trajectory_reference import encode_slowly, group_of_batch
from anabranch.schemas.trajectory_schema import SCHEMA, SPAN, Group, LaterRollouts, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan

_INT32, _INT64, _FLOAT, _DOUBLE = pa.int32(), pa.int64(), pa.float32(), pa.float64()
_INTS, _FLOATS, _SPANS = pa.list_(_INT32), pa.list_(_FLOAT), pa.list_(SPAN)
_CODE = {_INT32: "i", _INT64: "q", _DOUBLE: "d"}


def encode_group(group: Group) -> bytes:
    """`group` as one Arrow IPC stream with a single record batch. Raises TrajectoryError if it is not well formed."""
    try:
        columns = _columns_of(group)
    except (AttributeError, OverflowError, TypeError, ValueError):  # a value that does not fit its column
        columns = None
    if columns is None:
        return encode_slowly(group)
    return b"".join((SCHEMA_MESSAGE, pa.RecordBatch.from_arrays(columns, schema=SCHEMA).serialize(), END_OF_STREAM))


def decode_group(payload: bytes | memoryview) -> Group:
    """The `Group` in `payload`, validated; arrays are read-only views into it.

    Raises:
        SchemaVersionError, TrajectoryError: as `read_batch`, or a rollout that is not well formed.
    """
    frame = find_frame(payload)
    return (frame and _group_of(payload, frame)) or group_of_batch(read_batch(payload))


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
        or not _indices_are_sound(group.group_index, group.attempt, samples)
        or _highest_if_sound(prompt, tokens, token_ends, logprobs, rewards) is None
        or not _spans_are_sound(span_ends, epochs, versions, starts, token_ends)
    ):
        return None
    span_columns = [_flat(_INT32, epochs), _flat(_INT64, versions), _flat(_INT32, starts)]
    prompts = pa.Array.from_buffers(_INT32, n * len(prompt), [None, pa.py_buffer(prompt.tobytes() * n)])
    return [
        _same_text(group.run, n), _same_text(group.region, n), _same_text(group.producer, n),
        _flat(_INT64, [group.group_index] * n),
        _flat(_INT32, samples),
        _same_number(_INT32, group.attempt, n),
        _lists(_INTS, array("i", range(0, (n + 1) * len(prompt), len(prompt))), prompts),
        _lists(_INTS, token_ends, pa.Array.from_buffers(_INT32, len(tokens), [None, pa.py_buffer(tokens)])),
        _lists(_FLOATS, token_ends, pa.Array.from_buffers(_FLOAT, len(tokens), [None, pa.py_buffer(logprobs)])),
        _lists(_SPANS, span_ends, pa.Array.from_buffers(SPAN, len(spans), [None], children=span_columns)),
        _flat(_DOUBLE, rewards),
        _texts([r.finish_reason for r in rows]),
        _texts([group.prompt_text] * n), _texts([r.text for r in rows]), _texts([group.answer] * n),
        _flat(_INT64, [r.started_ms for r in rows]), _flat(_INT64, [r.finished_ms for r in rows]),
        _same_number(_INT32, group.group_size, n),
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


@lru_cache(maxsize=64)
def _same_number(kind: pa.DataType, value: int, n: int) -> pa.Array:
    return _flat(kind, [value] * n)


def _lists(kind: pa.DataType, ends: array[int], values: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(kind, len(ends) - 1, [None, pa.py_buffer(ends)], children=[values])


# The rules of `trajectory_reference.check_rollout`, over all rollouts at once. Numbers per token are left to numpy; those per
# rollout are so few that Python is quicker.


def _ascends(values: Sequence[int]) -> bool:
    return all(map(lt, values, values[1:]))


def _indices_are_sound(group_index: int, attempt: int, samples: Sequence[int]) -> bool:
    return group_index >= 0 and attempt >= 0 and min(samples) >= 0


_MOST = 1e-3  # a log-prob above 0 by no more is rounding
_LOWEST, _HIGHEST = np.minimum.reduce, np.maximum.reduce  # without the wrappers that `min` and `max` go through


def _highest_if_sound(
    prompt: NDArray[np.int32],
    tokens: NDArray[np.int32],
    ends: Sequence[int],
    logprobs: NDArray[np.float32],
    rewards: Sequence[float],
) -> int | None:
    """The highest token id if all are sound. A NaN is what lowest and highest are if there is one, and fails every comparison."""
    if not len(prompt) or tokens.ndim != 1 or logprobs.ndim != 1 or not _ascends(ends):
        return None
    # As unsigned a negative one is higher than all others.
    highest = max(int(_HIGHEST(prompt.view(np.uint32))), int(_HIGHEST(tokens.view(np.uint32))))
    if highest < 2**31 and _HIGHEST(logprobs) <= _MOST and _LOWEST(logprobs) > -inf and all(map(isfinite, rewards)):
        return highest
    return None


def _spans_are_sound(
    ends: Sequence[int],
    epochs: Sequence[int],
    versions: Sequence[int],
    starts: Sequence[int],
    token_ends: Sequence[int],
) -> bool:
    if len(starts) == len(ends) - 1:  # one each, as almost always
        ordered = list(ends) == list(range(len(ends))) and not any(starts)
    else:
        ordered = _ascends(ends) and all(
            starts[first] == 0 and _ascends(starts[first:end]) and starts[end - 1] < token_ends[i + 1] - token_ends[i]
            for i, (first, end) in enumerate(pairwise(ends))
        )
    return ordered and min(epochs) >= 0 and min(versions) >= 0


def _group_of(payload: bytes | memoryview, frame: Frame) -> Group | None:
    """The group in `payload` if it is plainly well formed; None for any other. All is judged here; the rollouts are made later."""
    column = Columns(payload, frame)
    n = column.rows
    samples, rewards = column.numbers("sample_index", "i"), column.numbers("reward", "d")
    group_index, attempt = column.same_number("group_index", "q"), column.same_number("attempt", "i")
    group_size = column.same_number("group_size", "i")
    run, region, producer = column.same_name("run"), column.same_name("region"), column.same_name("producer")
    prompt_text, answer = column.same_text("prompt_text"), column.same_text("answer")
    prompt = column.same_list("prompt_token_ids", np.int32)
    token_ends, span_ends = column.ends("token_ids"), column.ends("version_spans")
    reasons, texts = column.names("finish_reason"), column.texts("text")
    if (
        group_index is None
        or attempt is None
        or group_size is None
        or run is None
        or region is None
        or producer is None
    ):
        return None
    if prompt_text is None or answer is None or prompt is None or reasons is None or texts is None:
        return None
    if token_ends is None or span_ends is None or column.ends("logprobs") != token_ends:
        return None
    tokens, logprobs = column.values("token_ids", np.int32), column.values("logprobs", np.float32)
    epochs, versions, starts = column.spans()
    if (
        group_size < n
        or len(set(samples)) != n
        or not _indices_are_sound(group_index, attempt, samples)
        or (highest := _highest_if_sound(prompt, tokens, token_ends, logprobs, rewards)) is None
        or not _spans_are_sound(span_ends, epochs, versions, starts, token_ends)
    ):
        return None

    def rollouts() -> tuple[Rollout, ...]:
        keys = list(zip(epochs, versions, starts, strict=True))
        made = {key: VersionSpan(_policy(*key[:2]), key[2]) for key in set(keys)}
        spans = [made[key] for key in keys]
        rows = zip(
            samples, pairwise(token_ends), pairwise(span_ends), rewards, reasons, texts.cut(),
            column.numbers("started_ms", "q"), column.numbers("finished_ms", "q"), strict=True,
        )  # fmt: skip
        return tuple(
            Rollout(sample, tokens[a:b], logprobs[a:b], tuple(spans[c:d]), reward, reason, text, started, finished)
            for sample, (a, b), (c, d), reward, reason, text, started, finished in rows
        )

    policies = frozenset(_policy(*key) for key in set(zip(epochs, versions, strict=True)))
    later = LaterRollouts(n, rollouts, highest, policies)
    return Group(run, region, producer, group_index, attempt, prompt, prompt_text, answer, later, group_size)


_policy = lru_cache(maxsize=256)(PolicyVersion)
