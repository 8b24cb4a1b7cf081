"""`anabranch weights verify --producers`: whether every engine computes with the weights that its version has.

Invariant: each producer that reports when the question is put is accounted for: right, wrong, failed, gone, or late, which
is an error. A digest is compared with that of the version the producer says it served when it took it.
Held by tests/unit/deploy/test_weights_live.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.metrics import ProducerStatus
from anabranch.transport.boards import RunBoard
from anabranch.transport.weight_channel import WeightChannel

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """`fault` is empty if the producer's engine has the weights that it should have."""

    producer: str
    policy: str
    digest: str
    fault: str
    unknown: bool = False  # nothing to compare with: the version has left the channel


def ask_producers(
    channel: WeightChannel,
    runs: RunBoard,
    *,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Answer], list[str]]:
    """Ask, and wait for the answers. Returns them by producer, and the producers that are late.

    A producer that stops reporting in the meantime is an answer with a fault. Raises TemporaryError if none reports.
    """
    asked = set(runs.producers())
    if not asked:
        raise TemporaryError("no producer reports, so there is nobody to ask")
    digests = {str(entry.policy): entry.digest for entry in channel.index()}
    token = runs.request_verification()
    end = clock() + deadline_s
    answers: dict[str, Answer] = {}
    while True:
        statuses = runs.producers()
        for name in asked - answers.keys():
            status = statuses.get(name)
            if status is None:
                answers[name] = Answer(name, "", "", "it stopped reporting before it answered")
            elif not status.policy:  # nothing to verify, so it will not answer
                answers[name] = Answer(name, "", "", "", unknown=True)
            elif status.verified_token == token:
                if status.verified_policy not in digests:
                    digests |= {str(entry.policy): entry.digest for entry in channel.index()}
                answers[name] = _judge(name, status, digests.get(status.verified_policy))
        late = sorted(asked - answers.keys())
        if not late or clock() >= end:
            return [answers[name] for name in sorted(answers)], late
        sleep(min(POLL_S, max(0.0, end - clock())))


def _judge(name: str, status: ProducerStatus, expected: str | None) -> Answer:
    policy, digest = status.verified_policy, status.verified_digest
    if status.verify_error:
        return Answer(name, policy, digest, status.verify_error)
    if expected is None:
        return Answer(name, policy, digest, "", unknown=True)
    if digest != expected:
        return Answer(name, policy, digest, f"its engine's weights have digest {digest}, {policy} has {expected}")
    return Answer(name, policy, digest, "")


def render(answers: list[Answer], late: list[str]) -> str:
    rows = [f"{'producer':<28} {'version':<12} {'digest':<12} result"]
    for answer in answers:
        if answer.fault:
            result = f"WRONG: {answer.fault}"
        elif not answer.policy:
            result = "serves none of the channel's versions yet"
        elif answer.unknown:
            result = "not compared: that version has left the channel"
        else:
            result = "right"
        rows.append(f"{answer.producer:<28} {answer.policy or '-':<12} {answer.digest[:12] or '-':<12} {result}")
    rows += [f"{name:<28} {'-':<12} {'-':<12} no answer yet" for name in late]
    return "\n".join(rows)
