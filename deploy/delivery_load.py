"""Groups to measure delivery with, and our own way of carrying them: a producer's appends, a learner's reads.

Invariant: what is timed is what a producer's sender and a learner's reader do with a stream, in their batch sizes; every group
that was written is read, verified, decoded and settled, or the pass fails. Held by tests/process/test_bench_delivery.py.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import redis

from anabranch.producers.courier import BATCH_BYTES, BATCH_RECORDS
from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import DeadlineError, TemporaryError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.trajectory import Group, Rollout, decode_group, encode_group
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.runtime import die_with_parent

RUN, PRODUCER = "bench", "east-0-0badcafe0badcafe"
MAX_ENTRY_BYTES = 16 * 2**20
CHARACTERS_PER_TOKEN = 4  # of the text beside the token ids
PROMPT_TOKENS = 64
PASS_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Pass:
    """One way of one load: wall-clock seconds, CPU seconds of this process (not of the server), payload bytes."""

    seconds: float
    cpu_s: float
    payload_bytes: int

    @property
    def mb_s(self) -> float:
        return self.payload_bytes / 1e6 / self.seconds


class Watch:
    """Times a block: `with Watch() as watch: ...`, then `watch.done(bytes)`."""

    def __enter__(self) -> Watch:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self._wall, self._cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def done(self, payload_bytes: int) -> Pass:
        return Pass(self._wall, self._cpu, payload_bytes)


def make_groups(count: int, *, rollouts: int, tokens: int, seed: int = 0) -> list[Group]:
    """`count` groups of `rollouts` completions of `tokens` tokens, of random ids and log-probs."""
    rng = np.random.default_rng(seed)
    text = "word " * (tokens * CHARACTERS_PER_TOKEN // 5 + 1)
    spans = (VersionSpan(PolicyVersion(1, 7), 0),)
    return [
        Group(
            run=RUN, region="east", producer=PRODUCER, group_index=index, attempt=0,
            prompt_token_ids=rng.integers(0, 50_000, PROMPT_TOKENS, np.int32),
            prompt_text=text[: PROMPT_TOKENS * CHARACTERS_PER_TOKEN], answer="42",
            rollouts=tuple(
                Rollout(
                    sample_index=sample, token_ids=rng.integers(0, 50_000, tokens, np.int32),
                    logprobs=-rng.random(tokens, np.float32), spans=spans, reward=float(sample % 2), finish_reason="stop",
                    text=text[: tokens * CHARACTERS_PER_TOKEN], started_ms=1_767_225_600_000, finished_ms=1_767_225_601_000,
                )
                for sample in range(rollouts)
            ),
        )
        for index in range(count)
    ]  # fmt: skip


def payload_of(size_bytes: int, *, rollouts: int = 8) -> bytes:
    """An encoded group of about `size_bytes`: as many tokens per completion as fit."""

    def encoded(tokens: int) -> bytes:
        return encode_group(make_groups(1, rollouts=rollouts, tokens=tokens)[0])

    few, many = len(encoded(64)), len(encoded(1088))
    return encoded(max(1, 64 + round((size_bytes - few) / ((many - few) / 1024))))


def per_read(read_bytes: int, payload_bytes: int) -> int:
    """Entries of one read."""
    return max(1, read_bytes // payload_bytes)


class Ours:
    """Both ends of a region's stream, each over a connection of its own, as two processes have.

    `read_bytes`: how much one read may bring, about.
    """

    def __init__(self, near: redis.Redis, far: redis.Redis, *, read_bytes: int) -> None:
        keys = Keys(RUN)
        self._producer, self._consumer = RedisStream(near, keys), RedisStream(far, keys)
        self._read_bytes = read_bytes
        self.next_seq = 1

    @staticmethod
    def per_append(payload_bytes: int) -> int:
        return max(1, min(BATCH_RECORDS, BATCH_BYTES // payload_bytes))

    def write(self, payloads: Sequence[bytes]) -> Pass:
        """Append `payloads`, which are of one size, about."""
        step = self.per_append(len(payloads[0]))
        with Watch() as watch:
            for first in range(0, len(payloads), step):
                self.append([(first + i, p) for i, p in enumerate(payloads[first : first + step])])
        return watch.done(sum(map(len, payloads)))

    def write_groups(self, groups: Sequence[Group], payload_bytes: int) -> Pass:
        """Encode and append `groups`, of about `payload_bytes` each when encoded."""
        step, sent = self.per_append(payload_bytes), 0
        with Watch() as watch:
            for first in range(0, len(groups), step):
                batch = [(group.group_index, encode_group(group)) for group in groups[first : first + step]]
                self.append(batch)
                sent += sum(len(payload) for _, payload in batch)
        return watch.done(sent)

    def append(self, batch: Sequence[tuple[int, bytes]]) -> None:
        """(group index, payload) each."""
        sealed = [Envelope(PRODUCER, seq, index, payload) for seq, (index, payload) in enumerate(batch, self.next_seq)]
        self.next_seq = self._producer.append(sealed, floor=1)

    def read(self, count: int, payload_bytes: int, *, rollout_by_rollout: bool = False) -> Pass:
        """Read, open, decode and settle `count` groups of about `payload_bytes`; `rollout_by_rollout`: and make an object of
        each rollout, which a reader leaves to whoever builds a batch. Raises DeadlineError: they do not come."""
        step, found, received = per_read(self._read_bytes, payload_bytes), 0, 0
        with Watch() as watch:
            end_s = time.monotonic() + PASS_DEADLINE_S
            while found < count:
                entries = self._consumer.read(LEARNER_GROUP, "bench", max_entries=step, block_ms=1_000)
                for entry in entries:
                    envelope = open_envelope(entry.fields, max_entry_bytes=MAX_ENTRY_BYTES)
                    group = decode_group(envelope.payload)
                    if rollout_by_rollout:
                        tuple(group.rollouts)
                    received += len(envelope.payload)
                self._consumer.settle(LEARNER_GROUP, [(entry.entry_id, "trained") for entry in entries])
                self._consumer.trim()
                found += len(entries)
                if time.monotonic() > end_s:
                    raise DeadlineError.waiting_for(f"{count - found} groups of this benchmark", PASS_DEADLINE_S)
        return watch.done(received)


class WriterProcess:
    """A producer's appends in a process of their own, so that they and a reader's work meet as they do in a run.

    Used as a context; the process has connected when it is entered.
    """

    def __init__(self, url: str, payload: bytes) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_write_when_told, args=(theirs, url, payload), daemon=True)

    def __enter__(self) -> WriterProcess:
        self._process.start()
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send_bytes(b"0")
        self._process.join(PASS_DEADLINE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(PASS_DEADLINE_S)

    def start(self, entries: int, first_seq: int) -> None:
        """Append so many entries now; `done` waits for the end."""
        self._pipe.send_bytes(json.dumps([entries, first_seq]).encode())

    def done(self) -> Pass:
        return Pass(*self._answer())

    def _answer(self) -> list[Any]:
        if not self._pipe.poll(PASS_DEADLINE_S):
            raise DeadlineError.waiting_for("this benchmark's writing process", PASS_DEADLINE_S)
        try:
            answer: list[Any] = json.loads(self._pipe.recv_bytes())
        except EOFError:
            raise TemporaryError("this benchmark's writing process ended") from None
        return answer


def _write_when_told(pipe: Connection, url: str, payload: bytes) -> None:
    die_with_parent()
    client = connect(url, deadline_s=10.0, what="the benchmark's server")
    ours = Ours(client, client, read_bytes=1)
    pipe.send_bytes(b"[]")
    while (order := json.loads(pipe.recv_bytes())) != 0:
        entries, ours.next_seq = order
        done = ours.write([payload] * entries)
        pipe.send_bytes(json.dumps([done.seconds, done.cpu_s, done.payload_bytes]).encode())
