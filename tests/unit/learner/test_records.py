from dataclasses import dataclass

from anabranch.learner.batch import build_batch
from anabranch.learner.feed import FedBatch
from anabranch.learner.records import age_tokens
from anabranch.schemas.trajectory import Group
from tests.unit.learner.conftest import NOW, make_group


@dataclass
class Came:
    group: Group
    region: str


def test_ages_are_told_by_region_in_flight_and_in_the_queue():
    groups = [make_group(i) for i in range(4)]
    fed = FedBatch([Came(g, "east" if g.group_index % 2 else "west") for g in groups[::-1]], {}, 0.0)  # type: ignore[list-item]
    batch = build_batch(groups, now=NOW, forks={}, max_age=8)
    in_flight, in_queue = age_tokens(fed, batch)
    assert sorted(in_flight) == sorted(in_queue) == ["east", "west"]
    tokens = {"east": 0, "west": 0}
    total = 0
    for row, length in enumerate(batch.lengths.tolist()):
        tokens["east" if batch.group_indices[batch.group[row]] % 2 else "west"] += length
        total += int(batch.ages[row, :length].sum())
    for ages in (in_flight, in_queue):
        assert {region: sum(counts.values()) for region, counts in ages.items()} == tokens
    gained = sum(age * n for ages in (in_flight, in_queue) for counts in ages.values() for age, n in counts.items())
    assert gained == total > 0, "what was gained in flight and in the queue is the whole age"
