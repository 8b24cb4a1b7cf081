"""Whether a producer lives, as far as the servers know: before the streams forget it.

Invariant: a producer is taken for living when it appended, or reported to the hub, within the last minute, when it holds
leases, and when the hub does not say. Held by tests/unit/deploy/test_producer_life.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.deploy.plain_text import plain
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import TemporaryError
from anabranch.transport import wiring
from anabranch.transport.stream import ProducerProgress

HEARD_WITHIN_MS = 60_000


@dataclass(frozen=True, slots=True)
class Heard:
    """What the hub knows of a producer. `state`: what it reported within the last minute, "" if nothing; `leases`: groups whose
    leases it holds; `unknown`: why the hub does not say."""

    state: str = ""
    leases: int = 0
    unknown: str = ""


def ask_hub(config: RunConfig, producer: str) -> Heard:
    """Raises ConfigError: credentials; AnabranchError: what the hub keeps is none of ours."""
    try:
        hub = wiring.connect_hub(config)
        try:
            status = hub.runs.producers(within_ms=HEARD_WITHIN_MS).get(producer)
            leases = hub.permits.state().leased.get(producer, 0)
        finally:
            hub.close()
    except TemporaryError as error:
        return Heard(unknown=str(error))
    return Heard("" if status is None else status.state, leases)


def signs_of_life(progress: Mapping[str, ProducerProgress], heard: Heard) -> list[str]:
    """In words. `progress`: by region. Pure."""
    signs = [
        f"it appended to region {region} {known.idle_ms // 1000} s ago"
        for region, known in progress.items()
        if known.idle_ms is not None and known.idle_ms < HEARD_WITHIN_MS
    ]
    if heard.state:
        signs.append(f"it reported to the hub within the last minute ({plain(heard.state, 60)})")
    if heard.leases:
        signs.append(f"it holds the leases of {heard.leases} groups")
    if heard.unknown:
        signs.append(f"whether it reports and holds leases is not known: {plain(heard.unknown)}")
    return signs


def refuse_living(producer: str, progress: Mapping[str, ProducerProgress], heard: Heard) -> None:
    """Raises TemporaryError: there is a sign that the producer lives."""
    signs = signs_of_life(progress, heard)
    if signs:
        raise TemporaryError(
            f"producer {plain(producer, 60)} may live: {'; '.join(signs)}. Forgotten, it would give again what its spool "
            "holds, and the ledger would count that twice. Stop it and try again a minute later, or give --force"
        )
