"""`anabranch replay why`: a trajectory's life for a person or a program.

Invariant: what no record tells is shown as unknown. Held by tests/unit/deploy/test_replay_life.py.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from anabranch.consumers.accounting import GAPS, Account
from anabranch.consumers.life import Life
from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_text import block, fate, when

_TIME = len("2026-01-02 03:04:05.678")


def render(life: Life, width: int) -> str:
    lines = [f"{plain(str(life.id))}: {fate(life.fate)}", ""]
    stage = max((len(m.stage) for m in life.moments), default=0)
    indent = " " * (_TIME + stage + 4)
    for moment in life.moments:
        words = moment.words + (f" ({moment.clock} clock)" if moment.clock else "")
        shown = block(words, max(20, width - len(indent)))
        lines.append(f"{when(moment.time_ms):<{_TIME}}  {moment.stage:<{stage}}  {shown[0]}".rstrip())
        lines += [f"{indent}{line.strip()}" for line in shown[1:]]
    if life.siblings:
        lines += ["", "the same group index came by other deliveries too:"]
        lines += [f"  {plain(s['group_id'])}  attempt {s['attempt']}, {fate(s['fate'])}" for s in life.siblings]
    if life.gaps:
        lines += ["", *(f"missing: {gap}" for gap in life.gaps)]
    return "\n".join(lines)


def as_json(life: Life) -> dict[str, Any]:
    return {
        "id": str(life.id),
        "fate": life.fate,
        "moments": [asdict(moment) for moment in life.moments],
        "siblings": life.siblings,
        "gaps": life.gaps,
    }


def render_account(found: Account) -> str:
    lines = [
        f"{found.groups:,} groups: {found.whole:,} have a whole life in the records, {found.open:,} have no fate yet"
    ]
    for gap, count in found.gaps.items():
        lines.append(
            f"{count:,} {gap}: {GAPS[gap]}; {', '.join(map(plain, found.examples[gap][:5]))}{', ...' if count > 5 else ''}"
        )
    return "\n".join(lines)


def account_json(found: Account) -> dict[str, Any]:
    return asdict(found) | {"groups": found.groups}
