"""A look at the ledgers of all regions at once, what is known of those that do not answer, and what alarms the learner.

Invariant: a region that is away costs its own time only and is shown as such, with what the learner counted last if the hub
still says. Held by tests/unit/deploy/test_ledger_look.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from anabranch.deploy.regions_asked import Asked, ask_regions, impatient
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.metrics import RegionCounts
from anabranch.transport import wiring
from anabranch.transport.stream import GroupLag, LedgerCounts


@dataclass(frozen=True, slots=True)
class RegionLedger:
    """`groups`: where the consumer groups of its stream are."""

    counts: LedgerCounts
    groups: tuple[GroupLag, ...] = ()


@dataclass(frozen=True, slots=True)
class Ledgers:
    """`asked`: answers, and why others gave none. `last`: what the learner counted in those, if it said."""

    asked: Asked[RegionLedger]
    last: dict[str, RegionCounts] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()  # of the learner, in its last status: it compares with its fate log too

    @property
    def unbalanced(self) -> list[str]:
        return [name for name, region in self.asked.answers.items() if not region.counts.balanced]


def look(config: RunConfig) -> Ledgers:
    """Raises ConfigError: credentials."""
    patient = impatient(config)

    def ask(name: str) -> RegionLedger:
        stream = wiring.connect_region(patient, name)
        try:
            return RegionLedger(stream.ledger(LEARNER_GROUP), stream.state().groups)
        finally:
            stream.close()

    with ThreadPoolExecutor(max_workers=1) as pool:  # a hub that is away costs no more time than a region
        said = pool.submit(_what_the_learner_said, patient)
        asked = ask_regions(sorted(config.regions), ask)
        last, alarms = said.result()
    return Ledgers(asked, {name: counts for name, counts in last.items() if name in asked.away}, alarms)


def _what_the_learner_said(config: RunConfig) -> tuple[dict[str, RegionCounts], tuple[str, ...]]:
    try:
        hub = wiring.connect_hub(config)
        try:
            status = hub.runs.learner()
        finally:
            hub.close()
    except TemporaryError:
        return {}, ()
    return (status.ledger, status.alarms) if status is not None else ({}, ())
