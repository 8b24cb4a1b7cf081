"""Groups to Arrow bytes and back, a column at a time.

Invariant: the arrays of a decoded `Group` are read-only views into the payload, and both directions agree with
`trajectory_reference`, down to the bytes and the words of an error: what is not plainly well formed here is given to the
reference, which judges it. Held by tests/property/test_trajectory_codec.py.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf, isfinite
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.schemas.trajectory_batch import END_OF_STREAM, SCHEMA_MESSAGE, PlainBatch, read_batch, read_plain
from anabranch.schemas.trajectory_reference import encode_slowly, group_of_batch
from anabranch.schemas.trajectory_schema import SCHEMA, SPAN, Group, Rollout
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
    plain = read_plain(payload)
    return (plain and _group_of(plain)) or group_of_batch(plain.batch if plain else read_batch(payload))


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
    return all(a < b for a, b in pairwise(values))


def _indices_are_sound(group_index: int, attempt: int, samples: Sequence[int]) -> bool:
    return group_index >= 0 and attempt >= 0 and min(samples) >= 0


_LOWEST, _HIGHEST = np.minimum.reduce, np.maximum.reduce  # without the wrappers that `min` and `max` go through


def _tokens_are_sound(
    prompt: NDArray[np.int32],
    tokens: NDArray[np.int32],
    ends: Sequence[int],
    logprobs: NDArray[np.float32],
    rewards: Sequence[float],
) -> bool:
    """A NaN is what lowest and highest are if there is one, and fails every comparison."""
    return bool(
        len(prompt)
        and tokens.ndim == logprobs.ndim == 1
        and _ascends(ends)
        and _LOWEST(prompt) >= 0
        and _LOWEST(tokens) >= 0
        and _HIGHEST(logprobs) <= 1e-3
        and _LOWEST(logprobs) > -inf
        and all(map(isfinite, rewards))
    )


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


def _group_of(plain: PlainBatch) -> Group | None:
    """The group in `plain` if it is plainly well formed; None for any other."""
    n, buffers = plain.batch.num_rows, plain.buffers
    at = _BUFFERS
    samples = _numbers("i", n, buffers[at["sample_index"]])
    rewards = _numbers("d", n, buffers[at["reward"]])
    group_index = _constant_number("q", n, buffers[at["group_index"]])
    attempt = _constant_number("i", n, buffers[at["attempt"]])
    group_size = _constant_number("i", n, buffers[at["group_size"]])
    run = _constant_text(n, buffers, at["run"])
    region = _constant_text(n, buffers, at["region"])
    producer = _constant_text(n, buffers, at["producer"])
    prompt_text = _constant_text(n, buffers, at["prompt_text"])
    answer = _constant_text(n, buffers, at["answer"])
    prompt = _constant_list(n, buffers, at["prompt_token_ids"])
    if group_index is None or attempt is None or group_size is None or prompt is None:
        return None
    if run is None or region is None or producer is None or prompt_text is None or answer is None:
        return None
    ends = _numbers("i", n + 1, buffers[at["token_ids"]])
    if ends[0] or not _ascends(ends) or _numbers("i", n + 1, buffers[at["logprobs"]]) != ends:
        return None  # else there are as many values as the offsets say
    tokens = np.frombuffer(buffers[at["token_ids"] + 2], np.int32, ends[-1])
    logprobs = np.frombuffer(buffers[at["logprobs"] + 2], np.float32, ends[-1])
    span_ends = _numbers("i", n + 1, buffers[at["version_spans"]])
    # behind the offsets: validity of the structs, then validity and values of each field
    epochs = _numbers("i", span_ends[-1], buffers[at["version_spans"] + 3])
    versions = _numbers("q", span_ends[-1], buffers[at["version_spans"] + 5])
    starts = _numbers("i", span_ends[-1], buffers[at["version_spans"] + 7])
    if (
        group_size < n
        or span_ends[0]
        or len(set(samples)) != n
        or not _indices_are_sound(group_index, attempt, samples)
        or not _tokens_are_sound(prompt, tokens, ends, logprobs, rewards)
        or not _spans_are_sound(span_ends, epochs, versions, starts, ends)
    ):  # fmt: skip
        return None
    made = {
        key: VersionSpan(PolicyVersion(*key[:2]), key[2]) for key in set(zip(epochs, versions, starts, strict=True))
    }
    spans = [made[key] for key in zip(epochs, versions, starts, strict=True)]
    rows = zip(
        samples, pairwise(ends), pairwise(span_ends), rewards, _texts_in(n, buffers, at["finish_reason"]),
        _texts_in(n, buffers, at["text"]), _numbers("q", n, buffers[at["started_ms"]]),
        _numbers("q", n, buffers[at["finished_ms"]]), strict=True,
    )  # fmt: skip
    rollouts = tuple(
        Rollout(sample, tokens[a:b], logprobs[a:b], tuple(spans[c:d]), reward, reason, text, started, finished)
        for sample, (a, b), (c, d), reward, reason, text, started, finished in rows
    )
    return Group(run, region, producer, group_index, attempt, prompt, prompt_text, answer, rollouts, group_size)


def _numbers(code: str, count: int, buffer: pa.Buffer | bytes) -> tuple[Any, ...]:
    return struct.unpack_from(f"<{count}{code}", buffer) if count else ()


def _constant_number(code: str, n: int, buffer: pa.Buffer) -> int | None:
    values = _numbers(code, n, buffer)
    return values[0] if values.count(values[0]) == n else None


def _texts_in(n: int, buffers: Sequence[pa.Buffer], at: int) -> Sequence[str]:
    offsets, held = buffers[at], memoryview(buffers[at + 1] or b"")
    if len(held) <= _NAMES_BYTES:
        return _names_in(n, bytes(offsets), bytes(held))
    return [str(held[a:b], "utf-8") for a, b in pairwise(_numbers("i", n + 1, offsets))]


_NAMES_BYTES = 1024


@lru_cache(maxsize=256)
def _names_in(n: int, offsets: bytes, data: bytes) -> Sequence[str]:
    """For columns that hardly change from group to group."""
    return [data[a:b].decode() for a, b in pairwise(_numbers("i", n + 1, offsets))]


def _constant_text(n: int, buffers: Sequence[pa.Buffer], at: int) -> str | None:
    texts = _texts_in(n, buffers, at)
    return texts[0] if texts.count(texts[0]) == n else None


def _constant_list(n: int, buffers: Sequence[pa.Buffer], at: int) -> NDArray[np.int32] | None:
    ends, data = _numbers("i", n + 1, buffers[at]), buffers[at + 2]
    length = ends[1] - ends[0]
    if data is None or ends != tuple(range(0, n * length + 1, max(1, length))):
        return None
    held, size = bytes(data), 4 * length
    return np.frombuffer(data, np.int32, length) if held[: n * size] == held[:size] * n else None


def _first_buffers() -> dict[str, int]:
    """For each column the place, among the buffers of `PlainBatch`, of the first behind its validity."""
    places, at = {}, 1
    for field in SCHEMA:
        places[field.name] = at + 1
        at += len(pa.array([], field.type).buffers())
    return places


_BUFFERS = _first_buffers()
