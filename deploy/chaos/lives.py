"""Whether every trajectory of a chaos run has a whole life in the records, from its permit to its fate.

Invariant: what ended is named by the fate log as the evidence has it, not by the reader under test; each such delivery has a whole life with
all its times, or is named with what is missing. A delivery that the records call open is still on its way by the evidence too. `why`
tells of a sample of them, drawn evenly, the same as the account. Nothing is changed. Held by
tests/unit/deploy/chaos/test_lives.py and tests/process/test_chaos.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.consumers.accounting import Judged, judge
from anabranch.consumers.life import life_of
from anabranch.consumers.run_reader import RunReader
from anabranch.deploy.chaos.evidence import Evidence, Identity
from anabranch.deploy.chaos.verdict import Check
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.trajectory_id import TrajectoryId

NAME = "trajectories accounted for, permit to fate"
TOLD = 100  # deliveries that `why` is asked of
MEMORY_BYTES = 256 * 2**20
_SHOWN = 5


def lives_check(run_directory: Path, evidence: Evidence) -> Check:
    """Of the records in `run_directory`."""
    try:
        with RunReader(run_directory, memory_bytes=MEMORY_BYTES, threads=1) as reader:
            judged = {Identity(*identity): one for identity, one in judge(reader).items()}
            ended = sorted({line.identity for line in evidence.fates})
            wrong = [*_unaccounted(ended, judged), *_open(judged, evidence), *_untold(reader, ended, judged)]
    except AnabranchError as error:
        return Check(NAME, False, "the records cannot be read", (str(error),))
    trajectories = sum(judged[identity].rollouts for identity in ended if identity in judged)
    whole = "all accounted: permit to fate" if not wrong else f"{len(wrong)} of {len(ended)} groups are not"
    return Check(NAME, not wrong, f"{trajectories} trajectories, {whole}", tuple(wrong[:_SHOWN]))


def _unaccounted(ended: Sequence[Identity], judged: Mapping[Identity, Judged]) -> list[str]:
    verdicts = {identity: judged[identity].verdict if identity in judged else "unknown" for identity in ended}
    return [f"{TrajectoryId(*identity)}: {verdict}" for identity, verdict in verdicts.items() if verdict != "whole"]


def _open(judged: Mapping[Identity, Judged], evidence: Evidence) -> list[str]:
    """What has no fate and is not on its way either."""
    on_its_way = {*evidence.spooled}
    for books in evidence.books.values():
        on_its_way |= books.open.keys() | books.dead.keys()
    ended = {line.identity for line in evidence.fates}
    lost = [i for i, one in judged.items() if i not in ended and (i not in on_its_way or one.verdict != "open")]
    return [
        f"{TrajectoryId(*identity)}: {judged[identity].verdict}, and on its way nowhere" for identity in sorted(lost)
    ]


def _untold(reader: RunReader, ended: Sequence[Identity], judged: Mapping[Identity, Judged]) -> list[str]:
    """Whole ones of which `why` tells less."""
    whole = [identity for identity in ended if identity in judged and judged[identity].verdict == "whole"]
    found = []
    for identity in whole[:: max(1, len(whole) // TOLD)]:
        life = life_of(reader, TrajectoryId(*identity))
        untimed = [moment.stage for moment in life.moments if moment.time_ms is None and moment.stage != "published"]
        if life.gaps or untimed or life.fate is None:
            found.append(
                f"{life.id}: why tells no time of {', '.join(untimed) or 'nothing'}; missing: {'; '.join(life.gaps) or 'nothing'}"
            )
    return found
