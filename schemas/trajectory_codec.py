"""Groups to Arrow bytes and back, a column at a time.

Invariant: the arrays of a decoded `Group` are read-only views into the payload, and both directions agree with
`trajectory_reference`, down to the bytes and the words of an error: what is not plainly well formed here is given to the
reference, which judges it. Held by tests/property/test_trajectory_codec.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf, isfinite
from operator import attrgetter, lt

import numpy as np
from numpy.typing import NDArray

from anabranch.schemas import trajectory_columns as columns
from anabranch.schemas.trajectory_batch import read_batch
from anabranch.schemas.trajectory_columns import padding
from anabranch.schemas.trajectory_frame import BODY, END_OF_STREAM, PLACES, Frame, find_frame, frame_of
from anabranch.schemas.trajectory_reference import encode_slowly, group_of_batch
from anabranch.schemas.trajectory_schema import Group, LaterRollouts, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan


def encode_group(group: Group) -> bytes:
    """`group` as one Arrow IPC stream with a single record batch. Raises TrajectoryError if it is not well formed."""
    try:
        payload = _payload_of(group)
    except (AttributeError, OverflowError, TypeError, ValueError, struct.error):  # a value that does not fit its column
        payload = None
    return encode_slowly(group) if payload is None else payload


def decode_group(payload: bytes | memoryview) -> Group:
    """The `Group` in `payload`, validated; arrays are read-only views into it.

    Raises:
        SchemaVersionError, TrajectoryError: as `read_batch`, or a rollout that is not well formed.
    """
    frame = find_frame(payload)
    return (frame and _group_of(payload, frame)) or group_of_batch(read_batch(payload))


def stamp_spooled(payload: bytes, spooled_ms: int) -> bytes:
    """`payload`, a result of `encode_group`, with another `spooled_ms`: what is known last is put in when the rest is bytes already."""
    frame = find_frame(payload)
    assert frame is not None, "encode_group leaves a frame of this version"
    column = struct.pack(f"<{frame.rows}q", *(spooled_ms,) * frame.rows)
    at = BODY + frame.starts[_SPOOLED.buffer]
    return b"".join((payload[:at], column, payload[at + len(column) :]))


_DTYPES = (np.dtype(np.int32), np.dtype(np.int32), np.dtype(np.float32))
_FIELDS = attrgetter(
    "sample_index", "token_ids", "logprobs", "spans", "reward", "finish_reason", "text", "started_ms", "finished_ms",
    "scored_ms",
)  # fmt: skip
_POLICY = attrgetter("policy.epoch", "policy.version", "start")


def _payload_of(group: Group) -> bytes | None:
    """The payload of a group that is plainly well formed; None for any other. Its columns are in the order of `SCHEMA`."""
    n, prompt = len(group.rollouts), group.prompt_token_ids
    if not 0 < n <= group.group_size:
        return None
    samples, ids, chances, spans, rewards, reasons, texts, started, finished, scored = zip(
        *map(_FIELDS, group.rollouts), strict=True
    )
    tokens, logprobs, token_ends = np.concatenate(ids), np.concatenate(chances), _ends(ids)
    span_ends = _ends(spans)
    epochs, versions, starts = zip(*(_POLICY(span) for own in spans for span in own), strict=True)
    if (
        (prompt.dtype, tokens.dtype, logprobs.dtype) != _DTYPES
        or prompt.ndim != 1
        or _ends(chances) != token_ends
        or not _indices_are_sound(group.group_index, group.attempt, samples)
        or _highest_if_sound(prompt, tokens, token_ends, logprobs, rewards) is None
        or not _spans_are_sound(span_ends, epochs, versions, starts, token_ends)
    ):
        return None
    names_size, names = columns.names_written((group.run, group.region, group.producer), n)
    reasons_size, reasons_column = columns.texts_written(reasons)
    prompt_size, prompt_column = columns.same_text_written(group.prompt_text, n)
    texts_size, texts_column = columns.texts_written(texts)
    answer_size, answers = columns.same_text_written(group.answer, n)
    prompts, offsets, pad = prompt.tobytes() * n, columns.offsets(n).pack(*token_ends), padding(tokens.nbytes)
    head, _, _ = frame_of([
        1, n, *names_size, n * len(prompt), len(tokens), len(tokens), len(starts), reasons_size, prompt_size, texts_size,
        answer_size,
    ])  # fmt: skip
    return b"".join((
        head, names,
        columns.indices(n).pack(
            *(group.group_index,) * n, *samples, *(group.attempt,) * n, *columns.even(n, len(prompt))
        ),
        prompts, padding(len(prompts)), offsets, tokens.data, pad, offsets, logprobs.data, pad,
        columns.spans(n, len(starts)).pack(*span_ends, *epochs, *versions, *starts, *rewards),
        reasons_column, prompt_column, texts_column, answers,
        columns.times(n).pack(
            *started, *finished, *(group.group_size,) * n, *(group.permit_ms,) * n, *scored, *(group.spooled_ms,) * n
        ),
        END_OF_STREAM,
    ))  # fmt: skip


def _ends(parts: Iterable[Sequence[object] | NDArray[np.generic]]) -> tuple[int, ...]:
    """Arrow's offsets of `parts`, one behind the other: 0, then where each ends."""
    return tuple(accumulate(map(len, parts), initial=0))


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


_RUN, _GROUP_INDEX, _PROMPT, _TOKENS, _LOGPROBS, _SPANS, _REASON, _PROMPT_TEXT, _TEXT, _ANSWER, _STARTED, _SPOOLED = (
    PLACES[name]
    for name in (
        "run", "group_index", "prompt_token_ids", "token_ids", "logprobs", "version_spans", "finish_reason", "prompt_text",
        "text", "answer", "started_ms", "spooled_ms",
    )
)  # fmt: skip
_NAMES_SIZES = slice(_RUN.size, PLACES["producer"].size + 1)


def _group_of(payload: bytes | memoryview, frame: Frame) -> Group | None:
    """The group in `payload` if it is plainly well formed; None for any other. All is judged here; the rollouts are made later."""
    n, at, sizes = frame.rows, frame.starts, frame.sizes
    view = memoryview(payload).toreadonly()[BODY:]
    names = columns.read_names(view, at[_RUN.buffer], at[_GROUP_INDEX.buffer], n, sizes[_NAMES_SIZES])
    reasons = columns.read_reasons(view, at[_REASON.buffer], n, sizes[_REASON.size])
    prompt_text = columns.read_same_text(view, at[_PROMPT_TEXT.buffer], n, sizes[_PROMPT_TEXT.size])
    texts = columns.read_texts(view, at[_TEXT.buffer], n, sizes[_TEXT.size])
    answer = columns.read_same_text(view, at[_ANSWER.buffer], n, sizes[_ANSWER.size])
    if names is None or reasons is None or prompt_text is None or texts is None or answer is None:
        return None

    indices = columns.indices(n).unpack_from(view, at[_GROUP_INDEX.buffer])
    group_index, attempt, samples = indices[0], indices[2 * n], indices[n : 2 * n]
    prompt_length, rest = divmod(sizes[_PROMPT.size], n)
    prompts = view[at[_PROMPT.buffer + 2] :][: 4 * sizes[_PROMPT.size]]
    times = columns.times(n).unpack_from(view, at[_STARTED.buffer])
    group_size, permit_ms, spooled_ms = times[2 * n], times[3 * n], times[5 * n]
    if (
        rest
        or indices[:n].count(group_index) != n
        or indices[2 * n : 3 * n].count(attempt) != n
        or indices[3 * n :] != columns.even(n, prompt_length)
        or not columns.are_alike(bytes(prompts), n)
        or times[2 * n : 3 * n].count(group_size) != n
        or times[3 * n : 4 * n].count(permit_ms) != n
        or times[5 * n :].count(spooled_ms) != n
        or group_size < n
        or len(set(samples)) != n
        or not _indices_are_sound(group_index, attempt, samples)
    ):
        return None

    count, token_count = sizes[_SPANS.size], sizes[_TOKENS.size]
    spans = columns.spans(n, count).unpack_from(view, at[_SPANS.buffer])
    span_ends, rewards = spans[: n + 1], spans[n + 1 + 3 * count :]
    epochs, versions, starts = (spans[n + 1 + i * count : n + 1 + (i + 1) * count] for i in range(3))
    token_ends = columns.offsets(n).unpack_from(view, at[_TOKENS.buffer])
    prompt = np.frombuffer(prompts, np.int32, prompt_length)
    tokens = np.frombuffer(view, np.int32, token_count, at[_TOKENS.buffer + 2])
    logprobs = np.frombuffer(view, np.float32, sizes[_LOGPROBS.size], at[_LOGPROBS.buffer + 2])
    if (
        token_ends[0]
        or token_ends[-1] != token_count
        or len(logprobs) != token_count
        or columns.offsets(n).unpack_from(view, at[_LOGPROBS.buffer]) != token_ends
        or span_ends[0]
        or span_ends[-1] != count
        or (highest := _highest_if_sound(prompt, tokens, token_ends, logprobs, rewards)) is None
        or not _spans_are_sound(span_ends, epochs, versions, starts, token_ends)
    ):
        return None

    def rollouts() -> tuple[Rollout, ...]:
        each, bounds = list(map(_span, epochs, versions, starts)), list(pairwise(token_ends))
        own = [tuple(each[a:b]) for a, b in pairwise(span_ends)]
        ids, chances = [tokens[a:b] for a, b in bounds], [logprobs[a:b] for a, b in bounds]
        moments = (times[:n], times[n : 2 * n], times[4 * n : 5 * n])
        return tuple(map(Rollout, samples, ids, chances, own, rewards, reasons, texts.cut(), *moments))

    later = LaterRollouts(n, rollouts, highest, _policies(epochs, versions))
    run, region, producer = names
    return Group(
        run, region, producer, group_index, attempt, prompt, prompt_text, answer, later, group_size, permit_ms, spooled_ms
    )  # fmt: skip


_policy = lru_cache(maxsize=256)(PolicyVersion)


@lru_cache(maxsize=1024)
def _span(epoch: int, version: int, start: int) -> VersionSpan:
    return VersionSpan(_policy(epoch, version), start)


@lru_cache(maxsize=256)
def _policies(epochs: tuple[int, ...], versions: tuple[int, ...]) -> frozenset[PolicyVersion]:
    return frozenset(map(_policy, epochs, versions))
