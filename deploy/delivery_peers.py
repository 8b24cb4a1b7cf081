"""What delivery is compared with: `redis-benchmark`, and one message per rollout read with XREAD count=1.

Invariant: a peer moves as many bytes, or the same rollouts, through the same server in the same run; it is spared checks that
ours makes. Held by tests/process/test_bench_delivery.py.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from anabranch.deploy.delivery_load import PASS_DEADLINE_S, Pass, Watch
from anabranch.schemas.errors import DeadlineError, TemporaryError
from anabranch.schemas.trajectory import Group

PROGRAM = "redis-benchmark"
STREAM, GROUP = "bench:peer", "peer"
_FIELDS = ("v", "1", "producer", "east-0-0badcafe0badcafe", "seq", "1", "group", "1", "size", "1", "xxh3", "0" * 16)

Message = dict[str, Any]
Dumps, Loads = Callable[[Message], bytes], Callable[[bytes], Message]


class RedisBenchmark:
    """`redis-benchmark` against one server. All figures are MB of payload per second."""

    def __init__(self, client: redis.Redis) -> None:
        to = client.connection_pool.connection_kwargs
        self._client, self._readers = client, 0
        # The password is that of a throw-away server on loopback; the program takes it in no other way.
        self._command = [PROGRAM, "-h", to["host"], "-p", str(to["port"]), "-a", to["password"] or "", "--csv"]

    @staticmethod
    def is_here() -> bool:
        return shutil.which(PROGRAM) is not None

    @classmethod
    def version(cls) -> str:
        if not cls.is_here():
            return ""
        return subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, timeout=10).stdout.strip()

    def write(self, size: int, entries: int, *, pipeline: int) -> float:
        """One connection, XADD of an entry with our fields and a payload of `size` bytes, `pipeline` per round trip."""
        return self._finished(*self._writing(size, entries, pipeline)) * size / 1e6

    def read(self, size: int, entries: int, *, count: int) -> float:
        """One connection, XREADGROUP of `count` of the written entries at a time; nothing is acknowledged."""
        return self._finished(*self._reading(entries, count)) * count * size / 1e6

    def together(self, size: int, entries: int, *, pipeline: int, count: int) -> float:
        """Both at the same time, as many bytes each way, on a stream that holds what is to be read; by the slower one."""
        writing, reading = self._writing(size, entries, pipeline), self._reading(entries, count)
        write, read = self._finished(*writing), self._finished(*reading)
        return min(write, read * count) * size / 1e6

    def set_and_get(self, size: int, requests: int) -> tuple[float, float]:
        """As it comes: 50 connections, no pipelining, one key."""
        words = ["-d", str(size), "-n", str(requests), "-t"]
        set_s, get_s = (self._finished(self._start([*words, test]), b"") for test in ("set", "get"))
        return set_s * size / 1e6, get_s * size / 1e6

    def _writing(self, size: int, entries: int, pipeline: int) -> tuple[subprocess.Popen[bytes], bytes]:
        words = ["-c", "1", "-P", str(pipeline), "-n", str(entries), "-x", "XADD", STREAM, "*", *_FIELDS, "payload"]
        # Not a group's bytes: redis-benchmark ends its input at the first 0.
        return self._start(words), b"x" * size

    def _reading(self, entries: int, count: int) -> tuple[subprocess.Popen[bytes], bytes]:
        self._readers += 1
        group = f"{GROUP}{self._readers}"
        self._client.xgroup_create(STREAM, group, id="0")
        words = ["-c", "1", "-n", str(-(-entries // count)), "XREADGROUP", "GROUP", group, "c", "COUNT", str(count)]
        return self._start([*words, "STREAMS", STREAM, ">"]), b""

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*self._command, *words], **pipes)

    def _finished(self, program: subprocess.Popen[bytes], given: bytes) -> float:
        """Requests per second. Raises TemporaryError: the program failed; DeadlineError: it does not end."""
        try:
            out, err = program.communicate(given, timeout=PASS_DEADLINE_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.communicate()
            raise DeadlineError.waiting_for(PROGRAM, PASS_DEADLINE_S) from None
        try:
            # "test","rps",...: the test's name may hold commas, in quotes
            return float(out.decode("utf-8", "replace").strip().splitlines()[-1].rsplit('","', 7)[1])
        except (IndexError, ValueError):
            raise TemporaryError(f"{PROGRAM} ended with {program.returncode}: {err[-200:]!r}") from None


def messages(groups: Sequence[Group]) -> list[Message]:
    """One message per rollout, as plain lists: made before anything is timed, which spares a peer the making."""
    return [
        {
            "run": group.run, "region": group.region, "group": group.group_index, "sample": rollout.sample_index,
            "attempt": group.attempt, "prompt_text": group.prompt_text, "text": rollout.text, "answer": group.answer,
            "input_ids": group.prompt_token_ids.tolist(), "output_ids": rollout.token_ids.tolist(),
            "logprobs": rollout.logprobs.tolist(), "reward": rollout.reward, "finish_reason": rollout.finish_reason,
            "versions": [[s.policy.epoch, s.policy.version, s.start] for s in rollout.spans],
            "started_ms": rollout.started_ms, "finished_ms": rollout.finished_ms,
        }
        for group in groups
        for rollout in group.rollouts
    ]  # fmt: skip


class OneByOne:
    """The nearest relative's way: XADD of one serialized rollout at a time, XREAD count=1, deserialize."""

    def __init__(self, near: redis.Redis, far: redis.Redis, dumps: Dumps, loads: Loads) -> None:
        self._near, self._far, self._dumps, self._loads = near, far, dumps, loads

    def write(self, rollouts: Sequence[Message]) -> Pass:
        sent = 0
        with Watch() as watch:
            for index, rollout in enumerate(rollouts):
                data = self._dumps(rollout)
                self._near.xadd(STREAM, {"index": index, "data": data}, maxlen=1_000_000, approximate=True)
                sent += len(data)
        return watch.done(sent)

    def read(self, count: int) -> Pass:
        """Raises DeadlineError: the messages do not come."""
        last, found, received = b"0", 0, 0
        with Watch() as watch:
            end_s = time.monotonic() + PASS_DEADLINE_S
            while found < count:
                reply = self._far.xread({STREAM: last}, count=1, block=100)
                for entries in reply.values() if reply else ():
                    for entry_id, fields in entries:
                        last = entry_id
                        self._loads(fields[b"data"])
                        received += len(fields[b"data"])
                        found += 1
                if time.monotonic() > end_s:
                    raise DeadlineError.waiting_for(f"{count - found} messages of this benchmark", PASS_DEADLINE_S)
        return watch.done(received)
