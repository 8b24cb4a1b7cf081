"""Made-up ends of a run, one thing wrong in each: the verdict must find it, and nothing else must cry."""

from __future__ import annotations

from collections import Counter

from anabranch.deploy.chaos.evidence import Evidence, FateLine, Identity, RegionBooks
from anabranch.deploy.chaos.verdict import judge

LOST = "groups lost"
DOUBLED = "deliveries with more than one end"
TWICE, EVER = "groups trained twice in one epoch", "groups trained twice in the whole run"
LEDGER, LOG = "ledger exact in every region", "ledger equal to the fate log"
STEPS, COMPLETE = "groups of all steps equal to the fate log", "evidence complete and readable"


def at(seq: int, producer: str = "east-0-a") -> Identity:
    return Identity("east", producer, seq)


def kept() -> Evidence:
    """Five groups of one producer: three trained, one too old, one still in the stream; another only in the spool."""
    fates = [FateLine(at(seq), seq - 1, "trained", 1) for seq in (1, 2, 3)]
    fates.append(FateLine(at(4), 3, "dropped:age", 1))
    books = RegionBooks(produced=5, added=5, fates={"trained": 3, "dropped:age": 1}, open=Counter({at(5): 1}))
    books.known = {"east-0-a": 5}
    return Evidence(
        fates=fates, spooled=Counter({at(5): 1, at(6): 1}), books={"east": books},
        last_seq={("east", "east-0-a"): 6}, consumed_by_steps=3,
    )  # fmt: skip


def failing(evidence: Evidence) -> set[str]:
    return {check.name for check in judge(evidence) if not check.ok}


def examples(evidence: Evidence, name: str) -> str:
    return "; ".join(next(check for check in judge(evidence) if check.name == name).examples)


def test_a_run_that_kept_everything() -> None:
    assert failing(kept()) == set()


def test_a_group_that_is_nowhere_is_lost() -> None:
    evidence = kept()
    evidence.last_seq["east", "east-0-a"] = 7
    assert failing(evidence) == {LOST}
    assert examples(evidence, LOST) == "east east-0-a/7"


def test_a_hole_is_lost_although_the_ledger_is_exact() -> None:
    evidence = kept()
    del evidence.fates[1]
    evidence.books["east"].produced = evidence.books["east"].added = 4
    evidence.books["east"].fates["trained"] = evidence.consumed_by_steps = 2
    assert failing(evidence) == {LOST}
    assert examples(evidence, LOST) == "east east-0-a/2"


def test_only_spooled_or_only_in_the_stream_or_a_dead_letter_is_not_lost() -> None:
    evidence = kept()
    evidence.spooled.clear()
    assert failing(evidence) == {LOST}, "seq 6 was in the spool alone"
    evidence.books["east"].dead[at(6)] = 1
    evidence.books["east"].fates["dropped:dead_letter"] = 1
    evidence.books["east"].produced = evidence.books["east"].added = 6
    assert failing(evidence) == set()


def test_a_delivery_with_two_fates() -> None:
    evidence = kept()
    evidence.fates.append(FateLine(at(4), 3, "dropped:duplicate", 1))
    evidence.books["east"].fates["dropped:duplicate"] = 1
    assert failing(evidence) == {DOUBLED, LEDGER}
    assert "dropped:age, dropped:duplicate" in examples(evidence, DOUBLED)


def test_a_delivery_with_a_fate_that_is_still_open() -> None:
    evidence = kept()
    evidence.books["east"].open[at(1)] = 1
    evidence.books["east"].produced = evidence.books["east"].added = 6
    assert failing(evidence) == {DOUBLED}


def test_an_entry_stored_twice() -> None:
    evidence = kept()
    evidence.books["east"].open[at(5)] = 2
    evidence.books["east"].produced = evidence.books["east"].added = 6
    assert failing(evidence) == {DOUBLED}


def test_a_group_trained_twice_in_one_epoch_under_two_deliveries() -> None:
    evidence = kept()
    evidence.fates[2] = FateLine(at(3), 0, "trained", 1)
    assert failing(evidence) == {TWICE, EVER}
    assert examples(evidence, TWICE) == "group 0 in epoch 1: 2 times"


def test_a_group_without_gradient_counts_as_trained() -> None:
    evidence = kept()
    evidence.fates[2] = FateLine(at(3), 0, "dropped:zero_variance", 1)
    evidence.books["east"].fates |= {"trained": 2, "dropped:zero_variance": 1}
    assert failing(evidence) == {TWICE, EVER}


def test_a_group_trained_in_two_epochs() -> None:
    evidence = kept()
    evidence.fates[2] = FateLine(at(3), 0, "trained", 2)
    assert failing(evidence) == {EVER}


def test_a_ledger_that_does_not_add_up() -> None:
    evidence = kept()
    evidence.books["east"].produced += 1
    evidence.books["east"].added += 1
    assert failing(evidence) == {LEDGER}
    assert examples(evidence, LEDGER) == "east: 6 produced + 0 foreign, 4 ended + 1 pending"


def test_an_entry_of_a_stranger_is_foreign_and_must_have_an_end() -> None:
    evidence = kept()
    evidence.books["east"].added += 1
    assert failing(evidence) == {LEDGER}
    evidence.books["east"].fates["dropped:dead_letter"] = 1
    assert failing(evidence) == set()


def test_a_ledger_that_the_fate_log_contradicts() -> None:
    evidence = kept()
    evidence.books["east"].fates = {"trained": 2, "dropped:age": 2}
    assert failing(evidence) == {LOG}
    assert "east trained: 2 in the ledger, 3 in the fate log" in examples(evidence, LOG)


def test_steps_that_trained_what_no_log_knows() -> None:
    evidence = kept()
    evidence.consumed_by_steps = 4
    assert failing(evidence) == {STEPS}


def test_what_faults_added_is_not_lost_when_a_server_forgets_it() -> None:
    evidence = kept()
    evidence.last_seq["east", "chaos-corrupt-1"] = 1
    evidence.last_seq["east", "chaos-twin-2"] = 1
    twin = Identity("east", "chaos-twin-2", 1)
    evidence.fates.append(FateLine(twin, 0, "dropped:duplicate", 1))
    assert failing(evidence) == set(), "append and fate were forgotten together"
    evidence.books["east"].known["chaos-twin-2"] = 1
    assert failing(evidence) == {LOG}, "a server that knows the append knows the fate"
    evidence.books["east"].fates["dropped:duplicate"] = 1
    evidence.books["east"].produced = evidence.books["east"].added = 6
    assert failing(evidence) == set()


def test_evidence_that_is_not_there_proves_nothing() -> None:
    evidence = kept()
    evidence.damage.append("000001.jsonl line 3")
    assert failing(evidence) == {COMPLETE}
    evidence.damage.clear()
    evidence.missing.append("the Redis of region west")
    assert failing(evidence) == {COMPLETE}
    assert STEPS in failing(Evidence()), "a run without a step is no success"
