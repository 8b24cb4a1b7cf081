"""Faults of entries: a payload with flipped bytes, garbage by a stranger, and one entry delivered or appended twice.

Invariant: what is added goes in through the real append script, or, for the stranger, by a raw XADD; each added entry has left
the learner's hands before the fault counts as healed. Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import random
from abc import abstractmethod

import redis

from anabranch.deploy.chaos.evidence import flat, order
from anabranch.deploy.chaos.fault import Fault, FaultPlan
from anabranch.deploy.chaos.lab import Lab
from anabranch.deploy.chaos.monitor import plain
from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.keys import LEARNER_GROUP

STRANGER = "chaos-stranger"  # consumer that takes entries and is never heard of again
_AWAY = (redis.RedisError, OSError, AnabranchError)


class _Corrupt(Envelope):
    """Sealed, then damaged."""

    def seal(self) -> dict[str, bytes | memoryview]:
        fields = Envelope.seal(self)
        payload, rng = bytearray(self.payload), random.Random(len(self.payload))  # noqa: S311
        for place in rng.sample(range(len(payload)), 3):
            payload[place] ^= 1 << rng.randrange(8)
        return {**fields, "payload": bytes(payload)}


class AddedEntry(Fault):
    """Something is added to a region's stream; healed once the learner has settled it, or its server has forgotten it."""

    where = "region"

    def __init__(self, plan: FaultPlan) -> None:
        super().__init__(plan)
        self.entry_id: str | None = None

    @property
    def resources(self) -> frozenset[str]:
        return frozenset()

    def inject(self, lab: Lab) -> bool:
        try:
            self.entry_id = self.add(lab)
        except _AWAY:
            return False
        if self.entry_id is not None:
            lab.injected[self.plan.target].add(self.entry_id)
        return self.entry_id is not None

    @abstractmethod
    def add(self, lab: Lab) -> str | None:
        """Its entry id; None if there is nothing to copy now."""

    def recovered(self, lab: Lab) -> bool:
        assert self.entry_id is not None
        try:
            return is_settled(lab, self.plan.target, self.entry_id)
        except _AWAY:
            return False


class CorruptEntry(AddedEntry):
    kind, weight = "corrupt entry", 8

    def add(self, lab: Lab) -> str | None:
        region, found = self.plan.target, newest(lab, self.plan.target)
        if found is None:
            return None
        envelope = _Corrupt(f"chaos-corrupt-{self.plan.number}", 1, found.group_index, found.payload)
        return append_new(lab, region, envelope)


class Garbage(AddedEntry):
    kind, weight = "garbage of a stranger", 6

    def add(self, lab: Lab) -> str | None:
        rng = random.Random(self.plan.number)  # noqa: S311
        fields = {rng.randbytes(4): rng.randbytes(rng.randrange(1, 500)) for _ in range(rng.randrange(1, 40))}
        reply = lab.servers[self.plan.target].xadd(lab.keys.trajectories, fields)
        return reply.decode() if isinstance(reply, bytes) else str(reply)


class AnotherProducer(AddedEntry):
    """The same group, appended under another producer's name: one of the two is dropped:duplicate."""

    kind, weight = "group appended by two producers", 6

    def add(self, lab: Lab) -> str | None:
        region, found = self.plan.target, newest(lab, self.plan.target)
        if found is None:
            return None
        return append_new(lab, region, Envelope(f"chaos-twin-{self.plan.number}", 1, found.group_index, found.payload))


class SameAgain(Fault):
    """An entry that is stored already, appended again under its own name: nothing must come of it."""

    kind, weight, where = "entry appended twice", 6, "region"

    def __init__(self, plan: FaultPlan) -> None:
        super().__init__(plan)
        self.stored_twice = False

    @property
    def resources(self) -> frozenset[str]:
        return frozenset()

    def inject(self, lab: Lab) -> bool:
        region = self.plan.target
        try:
            found = newest(lab, region)
            if found is None or found.producer.startswith("chaos-"):
                return False
            lab.streams[region].append([found], floor=found.seq)
            self.stored_twice = copies(lab, region, found) > 1
        except _AWAY:
            return False
        return True

    def recovered(self, lab: Lab) -> bool:
        return not self.stored_twice

    def flows(self, lab: Lab) -> tuple[str, ...]:
        return ()


class DeadConsumer(Fault):
    """A consumer takes entries of the learner's group, some of them from the learner itself, and is never heard of again."""

    kind, weight, where = "entries taken by a consumer that dies", 5, "region"

    @property
    def resources(self) -> frozenset[str]:
        return frozenset()

    def inject(self, lab: Lab) -> bool:
        server, key = lab.servers[self.plan.target], lab.keys.trajectories
        try:
            taken = server.execute_command(
                "XREADGROUP", "GROUP", LEARNER_GROUP, STRANGER, "COUNT", 4, "STREAMS", key, ">"
            )
            held = server.execute_command("XPENDING", key, LEARNER_GROUP, "-", "+", 2)
            if held:
                server.execute_command("XCLAIM", key, LEARNER_GROUP, STRANGER, 0, *[entry[0] for entry in held])
        except _AWAY:
            return False
        return bool(taken or held)

    def recovered(self, lab: Lab) -> bool:
        server, key = lab.servers[self.plan.target], lab.keys.trajectories
        try:
            return not server.execute_command("XPENDING", key, LEARNER_GROUP, "-", "+", 1, STRANGER)
        except _AWAY:
            return False


def newest(lab: Lab, region: str) -> Envelope | None:
    """A copy of the newest entry of a real producer."""
    entries = lab.servers[region].execute_command("XREVRANGE", lab.keys.trajectories, "+", "-", "COUNT", 8)
    for _, fields in entries or []:
        entry = flat(fields)
        if not entry.get(b"producer", b"chaos-").startswith(b"chaos-"):
            return open_envelope(entry, max_entry_bytes=lab.place.config.stream.max_entry_bytes)
    return None


def append_new(lab: Lab, region: str, envelope: Envelope) -> str | None:
    """Through the real script; its entry id."""
    lab.streams[region].append([envelope], floor=envelope.seq)
    entries = lab.servers[region].execute_command("XREVRANGE", lab.keys.trajectories, "+", "-", "COUNT", 64)
    for entry_id, fields in entries or []:
        if flat(fields).get(b"producer") == envelope.producer.encode():
            return str(entry_id.decode())
    return "0-1"  # the learner was quicker


def copies(lab: Lab, region: str, envelope: Envelope) -> int:
    """How often one (producer, seq) stands in the stream."""
    entries = lab.servers[region].execute_command("XREVRANGE", lab.keys.trajectories, "+", "-", "COUNT", 64)
    name = (envelope.producer.encode(), str(envelope.seq).encode())
    found = [flat(fields) for _, fields in entries or []]
    return sum((entry.get(b"producer"), entry.get(b"seq")) == name for entry in found)


def is_settled(lab: Lab, region: str, entry_id: str) -> bool:
    """Whether the learner's group has read and acknowledged it (or passed it: a server that forgot it)."""
    server, key = lab.servers[region], lab.keys.trajectories
    if order(last_delivered(server, key)) < order(entry_id):
        return False
    return not server.execute_command("XPENDING", key, LEARNER_GROUP, entry_id, entry_id, 1)


def last_delivered(server: redis.Redis, key: str) -> str:
    """The newest entry that the learner's group has read."""
    groups = map(plain, server.execute_command("XINFO", "GROUPS", key))
    last = next((g["last-delivered-id"] for g in groups if g["name"] == LEARNER_GROUP.encode()), b"0-0")
    return str(last.decode())


KINDS: tuple[type[Fault], ...] = (CorruptEntry, Garbage, AnotherProducer, SameAgain, DeadConsumer)
