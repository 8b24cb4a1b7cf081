"""`anabranch replay ls`: a page of the table of trajectories as text or JSON. Pure.

Invariant: a line a row, as wide as was asked for. Held by tests/unit/cli/test_replay_look.py.
"""

from __future__ import annotations

import json
from typing import Any

from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_text import fate, fit, json_value, number, table, versions


def render(rows: list[dict[str, Any]], total: int, *, limit: int, page: int, width: int) -> str:
    if not rows:
        return f"no trajectory on page {page}: {total:,} fit" if total else "no trajectory fits"
    cells = [
        [plain(row["id"] or "?"), fate(row["fate"]), number(row["step"]), number(row["age"]), versions(row), number(row["reward"]),
         number(row["advantage"], 3), number(row["tokens"])]
        for row in rows
    ]  # fmt: skip
    lines = table(["id", "fate", "step", "age", "sampled by", "reward", "advantage", "tokens"], cells, left=(0, 1, 4))
    start = max(map(len, lines)) + 2
    if width - start >= 8:
        texts = ["text", *(plain(row["snippet"]) for row in rows)]
        lines = [f"{line:<{start}}{fit(text, width - start)}".rstrip() for line, text in zip(lines, texts, strict=True)]
    first = (page - 1) * limit + 1
    more = f"; --page {page + 1} has more" if first + len(rows) - 1 < total else ""
    return "\n".join([*lines, "", f"{first:,} to {first + len(rows) - 1:,} of {total:,}{more}"])


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(json_value(row)) for row in rows)
