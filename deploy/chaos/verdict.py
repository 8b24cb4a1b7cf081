"""Whether a chaos run kept its promises, from the evidence alone.

Invariant: pure; a delivery that is nowhere, has two fates, or an index trained twice is found whatever the ledgers say, and so
is a ledger that does not add up. Held by tests/unit/deploy/chaos/test_verdict.py.

Deliveries of producers named "chaos-…" were added by a fault and have no spool: a server may forget them, nobody gives them
again. They are never counted as lost, but must not be trained twice either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.deploy.chaos.evidence import Evidence, FateLine, Identity
from anabranch.schemas.fates import CONSUMED

ADDED = "chaos-"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict; `found` says the figure, `examples` what breaks it."""

    name: str
    ok: bool
    found: str
    examples: tuple[str, ...] = ()


def judge(evidence: Evidence) -> list[Check]:
    """Everything that deliveries and books tell; processes, waits and faults are judged by deploy/chaos/conduct.py."""
    fates: dict[Identity, list[FateLine]] = {}
    for line in evidence.fates:
        fates.setdefault(line.identity, []).append(line)
    checks = [_complete(evidence), _lost(evidence, fates), _doubled(evidence, fates), *_trained_twice(evidence)]
    checks += [_balance(evidence), _books_and_log(evidence), _steps(evidence)]
    return checks


def _complete(evidence: Evidence) -> Check:
    wrong = [*evidence.missing, *evidence.damage]
    return _check("evidence complete and readable", wrong, f"{len(wrong)} unreadable")


def _lost(evidence: Evidence, fates: dict[Identity, list[FateLine]]) -> Check:
    opened, dead, total = Counter[Identity](), Counter[Identity](), 0
    for books in evidence.books.values():
        opened.update(books.open)
        dead.update(books.dead)
    lost = []
    for (region, producer), last in sorted(evidence.last_seq.items()):
        if producer.startswith(ADDED):
            continue
        for seq in range(1, last + 1):
            total += 1
            identity = Identity(region, producer, seq)
            if not (identity in fates or identity in opened or identity in dead or identity in evidence.spooled):
                lost.append(_name(identity))
    return _check("groups lost", lost, f"{len(lost)} of {total}")


def _doubled(evidence: Evidence, fates: dict[Identity, list[FateLine]]) -> Check:
    doubled = [f"{_name(i)}: {', '.join(x.fate for x in lines)}" for i, lines in fates.items() if len(lines) > 1]
    for books in evidence.books.values():
        doubled += [f"{_name(i)}: {n} dead letters" for i, n in books.dead.items() if n > 1]
        doubled += [f"{_name(i)}: dead letter and {fates[i][0].fate}" for i in books.dead if i in fates]
        doubled += [f"{_name(i)}: {n} times in the stream" for i, n in books.open.items() if n > 1]
        doubled += [f"{_name(i)}: {fates[i][0].fate}, and still open" for i in books.open if i in fates]
    return _check("deliveries with more than one end", doubled, str(len(doubled)))


def _trained_twice(evidence: Evidence) -> list[Check]:
    within: Counter[tuple[int, int]] = Counter()
    overall: Counter[int] = Counter()
    for line in evidence.fates:
        if line.fate in CONSUMED:
            within[line.epoch, line.group_index] += 1
            overall[line.group_index] += 1
    again = [f"group {index} in epoch {epoch}: {n} times" for (epoch, index), n in within.items() if n > 1]
    ever = [f"group {index}: {n} times" for index, n in overall.items() if n > 1]
    return [
        _check("groups trained twice in one epoch", again, f"{len(again)} of {len(overall)} trained"),
        _check("groups trained twice in the whole run", ever, str(len(ever))),
    ]


def _balance(evidence: Evidence) -> Check:
    wrong, shown = [], []
    for region, books in sorted(evidence.books.items()):
        ended = sum(books.fates.values())
        line = f"{region}: {books.produced} produced + {books.foreign} foreign, {ended} ended + {books.pending} pending"
        shown.append(line)
        if books.produced + books.foreign != ended + books.pending or books.foreign < 0:
            wrong.append(line)
    return _check("ledger exact in every region", wrong, "; ".join(shown))


def _books_and_log(evidence: Evidence) -> Check:
    """What a server forgot of a fault's own entries (append and fate with it) is left out of the log's side."""
    logged: dict[str, Counter[str]] = {}
    for line in evidence.fates:
        region, producer, _ = line.identity
        books = evidence.books.get(region)
        if producer.startswith(ADDED) and books is not None and producer not in books.known:
            continue
        logged.setdefault(region, Counter())[line.fate] += 1
    wrong = []
    for region, books in sorted(evidence.books.items()):
        counted = {f: n for f, n in books.fates.items() if f not in ("dropped:dead_letter", "dropped:lost") and n}
        for fate in sorted(counted.keys() | logged.get(region, Counter()).keys()):
            in_log = logged.get(region, Counter())[fate]
            if counted.get(fate, 0) != in_log:
                wrong.append(f"{region} {fate}: {counted.get(fate, 0)} in the ledger, {in_log} in the fate log")
    return _check("ledger equal to the fate log", wrong, f"{len(evidence.fates)} lines")


def _steps(evidence: Evidence) -> Check:
    consumed = sum(line.fate in CONSUMED for line in evidence.fates)
    expected = evidence.consumed_by_steps
    wrong = [] if expected == consumed else [f"steps consumed {expected}, the fate log has {consumed}"]
    return _check("groups of all steps equal to the fate log", wrong, f"{consumed} consumed")


def _check(name: str, wrong: Sequence[str], found: str) -> Check:
    return Check(name, not wrong, found, tuple(wrong[:_SHOWN]))


def _name(identity: Identity) -> str:
    return f"{identity.region} {identity.producer}/{identity.seq}"
