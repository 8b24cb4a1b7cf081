"""Whatever somebody else wrote into a key of the run: a command shows it as it can, or says which server holds it, in a line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from anabranch.cli.main import main
from anabranch.consumers.fate_log import FateLog
from anabranch.schemas.errors import EXIT_INTERNAL
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.metrics import LearnerStatus, ProducerStatus
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_boards import RedisRunBoard
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_stream import RedisStream
from tests.groups import entry

pytestmark = pytest.mark.process
Act = Callable[[redis.Redis, str], object]

LETTER = "1767225600000-0"
PERMITS = ("permits", "permits --json")
LEDGER, AUDIT = "ledger --json", "ledger --audit"
LS, SHOW, REQUEUE = "dead-letter ls", f"dead-letter show {LETTER} --json", "dead-letter requeue --all --dry-run"
STREAM, GROUP, PRODUCER = "stream ls", "stream forget-group recorder --yes", "stream forget-producer east-0-aa --yes"
READERS = {  # which commands read a key
    "hash": {
        "permits": PERMITS, "holders": PERMITS, "producers": PERMITS[:1], "run_state": (REQUEUE,),
        "seen": (AUDIT, PRODUCER), "ledger": (LEDGER, AUDIT, LS), "open_ids": (AUDIT, PRODUCER),
        "seen_at": (PRODUCER,),
    },
    "zset": {
        "leases": PERMITS[:1], "returned": PERMITS[:1], "abandoned": PERMITS[:1], "producers_seen": PERMITS[:1],
        "open_entries": (AUDIT, PRODUCER),
    },
    "string": {"learner": (LEDGER, REQUEUE)},
    "stream": {
        "trajectories": ("ledger", LEDGER, AUDIT, STREAM, f"{STREAM} --json", GROUP, PRODUCER),
        "dead_letters": (AUDIT, LS, f"{LS} --json", SHOW, SHOW.removesuffix(" --json"), REQUEUE),
    },
}  # fmt: skip
CASES = [(kind, name) for kind, names in READERS.items() for name in names]
VALUES = (b"many", b"\xff\xfe", b"", b"-7", b"1e400", b"9" * 400, b'{"epoch": "x"}')
TEXTS = (b"", b"\xff", b"{", b"null", b'{"epoch": "x"}', b"[" * 100_000)


def another_type(client: redis.Redis, key: str) -> None:
    was = client.type(key)
    client.delete(key)
    client.set(key, "nonsense") if was != b"string" else client.rpush(key, "nonsense")


def every_field(value: bytes) -> Act:
    def act(client: redis.Redis, key: str) -> None:
        for field in client.hkeys(key):
            client.hset(key, field, value)

    return act


def one_field(field: bytes, value: bytes) -> Act:
    return lambda client, key: client.hset(key, mapping={field: value})


def one_member(member: bytes, score: float) -> Act:
    return lambda client, key: client.zadd(key, {member: score})


def text(value: bytes) -> Act:
    return lambda client, key: client.set(key, value)


def an_entry(*fields: tuple[bytes, bytes]) -> Act:
    def act(client: redis.Redis, key: str) -> None:
        if dead := key.endswith(":dead"):
            client.delete(key)
        client.xadd(key, dict(fields), id=LETTER if dead else "*")

    return act


def a_group(client: redis.Redis, key: str) -> None:
    client.xgroup_create(key, b"\xff\xfe\x1b[2J", id="0")
    client.xreadgroup(b"\xff\xfe\x1b[2J", b"\xff", {key: ">"}, count=1)


def spoilers(kind: str) -> Iterator[Act]:
    if kind == "hash":
        yield from map(every_field, VALUES)
        yield one_field(b"\xff\xfe", b"1")
        yield one_field(b"dropped:\xff", b"many")
    elif kind == "zset":
        for member, score in itertools.product((b"many", b"\xff\xfe", b"a -1"), (0.0, float("inf"))):
            yield one_member(member, score)
    elif kind == "string":
        yield from map(text, TEXTS)
    else:
        yield an_entry((b"\xff", b"\xff"))
        yield an_entry((b"producer", b"\xff"), (b"seq", b"\xff"), (b"group", b"\xff"), (b"payload", b"\xff"))
        yield an_entry((b"cause", b"\xff"), (b"by", b"\xff"), (b"id", b"\xff"))
        yield an_entry(
            (b"cause", b"x"), (b"by", b"learner"), (b"id", b"\xff"), (b"producer", b"p"), (b"seq", b"9" * 400)
        )
        yield a_group


@pytest.fixture
def options(client: redis.Redis, valkey: EmbeddedValkey, keys: Keys, tmp_path: Path) -> list[str]:
    """A run as it is in the midst of its work."""
    permits = RedisPermits(client, keys)
    permits.reset(epoch=1, version=0, batch=2, max_age=2, total=100, accepted=[0, 1], abandoned=[3])
    taken = permits.take("east-0-aa", max_groups=4, lease_ms=60_000)
    permits.give_back([taken[0].group_index])
    board = RedisRunBoard(client, keys)
    board.report_learner(LearnerStatus(updated_ms=1, state="stepping", step=1, steps_total=2, epoch=1, version=1))
    board.report_producer("east-0-aa", ProducerStatus(updated_ms=1, region="east", pid=1, state="idle", policy="e1.v1"))
    board.finish("all steps done")
    stream = RedisStream(client, keys)
    stream.append([entry(n, n, producer="east-0-aa", run=keys.run) for n in (1, 2, 3, 4)], floor=1)
    first, second, _, _ = stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    stream.settle(LEARNER_GROUP, [(first.entry_id, "trained")])
    stream.dead_letter(LEARNER_GROUP, second, "bad")
    (letter,) = client.xrange(keys.dead_letters)
    client.xtrim(keys.dead_letters, maxlen=0)
    client.delete(keys.dead_letters)
    client.xadd(keys.dead_letters, letter[1], id=LETTER)
    FateLog(tmp_path / keys.run / "fates", file_lines=100).close()
    (tmp_path / keys.run / "fates").mkdir(parents=True, exist_ok=True)
    return [
        f"--set={key}={value}"
        for key, value in {
            "run.name": keys.run, "run.dir": tmp_path, "hub.url": valkey.url, "regions.east.url": valkey.url,
            "channel.connect_deadline_s": 5,
        }.items()
    ]  # fmt: skip


def dumps(client: redis.Redis, keys: Keys) -> dict[bytes, bytes]:
    return {name: client.dump(name) for name in client.scan_iter(match=f"ab:{keys.run}:*")}


def restore(client: redis.Redis, keys: Keys, saved: dict[bytes, bytes]) -> None:
    for name in client.scan_iter(match=f"ab:{keys.run}:*"):
        client.delete(name)
    for name, value in saved.items():
        client.restore(name, 0, value)


Trial = Callable[[Act, str, str], str]


@pytest.fixture
def trial(options: list[str], client: redis.Redis, keys: Keys, capfd: pytest.CaptureFixture[str]) -> Trial:
    """What is wrong with how a command ends when a key is spoilt, "" if nothing is."""
    saved = {name: client.dump(name) for name in client.scan_iter(match=f"ab:{keys.run}:*")}

    def run(spoil: Act, name: str, command: str) -> str:
        key = getattr(keys, name)
        for there in client.scan_iter(match=f"ab:{keys.run}:*"):
            client.delete(there)
        for there, value in saved.items():
            client.restore(there, 0, value)
        assert client.exists(key), "else this test shows nothing"
        spoil(client, key)
        code = main([*command.split(), *options])
        said = capfd.readouterr()
        if "Traceback" in said.err:
            return f"{command}: " + " / ".join(said.err.strip().splitlines()[-6:])
        if "\x1b" in said.out + said.err:
            return f"{command}: moves the cursor"
        if code == EXIT_INTERNAL and "redis://" not in said.err:
            return f"{command}: names no server: {said.err}"
        return ""

    return run


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_values_that_are_none_of_ours(kind: str, name: str, trial: Trial) -> None:
    failed = [trial(spoil, name, command) for spoil in spoilers(kind) for command in READERS[kind][name]]
    assert not any(failed), "\n".join(dict.fromkeys(filter(None, failed)))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_key_of_another_type(kind: str, name: str, trial: Trial) -> None:
    failed = [trial(another_type, name, command) for command in READERS[kind][name]]
    assert not any(failed), "\n".join(filter(None, failed))
