"""`anabranch replay show` and `group`: everything that was recorded of one trajectory, or of a group side by side.

Invariant: per-token values stand beside the token they were recorded for; what was not recorded is shown as "-". Held by
tests/unit/deploy/test_replay_show.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from anabranch.consumers.token_values import Piece, token_policies, token_ratios
from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_text import UNKNOWN, block, fate, fit, number, table, versions, when


def render(row: dict[str, Any], *, width: int, pieces: Piece | None = None, tokens: int | None = 64) -> str:
    """`tokens`: at most so many lines of them; None for all."""
    lines = [plain(row["id"])]
    spans = row["version_spans"]
    ends = [*(s["start"] for s in spans[1:]), row["tokens"]]
    sampled = ", ".join(
        f"e{s['epoch']}.v{s['version']}: tokens {s['start']} to {end - 1}" for s, end in zip(spans, ends, strict=True)
    )
    joined = [
        ("fate", fate(row["fate"]) + (f", {when(row['fate_time_ms'])}" if row["fate_time_ms"] else "")),
        ("step", UNKNOWN if row["step"] is None else f"{row['step']} of epoch {row['train_epoch']}"),
        ("age", number(row["age"])),
        ("advantage", number(row["advantage"])),
        ("weight", f"{number(row['weight'])} a token"),
        ("ratio", f"mean {number(row['ratio_mean'])}, max {number(row['ratio_max'])}"),
        ("kept", UNKNOWN if row["kept_fraction"] is None else f"{row['kept_fraction']:.1%} of its tokens"),
        ("loss share", number(row["loss_share"])),
    ]
    facts = [
        ("run", plain(row["run"] or UNKNOWN)),
        ("group", f"index {row['group_index']}, attempt {row['attempt']}, {row['group_size']} rollouts asked for"),
        ("entry", f"{plain(row['entry_id'] or UNKNOWN)} of region {plain(row['region'])}"),
        (
            "sampled",
            f"{when(row['started_ms'])} to {when(row['finished_ms'])}, {row['tokens']} tokens, ended by {plain(row['finish_reason'])}",
        ),
        ("by", sampled),
        ("reward", number(row["reward"])),
        ("answer", plain(row["answer"], max(20, width - 14))),
        *joined,
    ]
    lines += [f"  {name:<10}  {value}" for name, value in facts]
    for title, text in (("prompt", row["prompt_text"]), ("completion", row["text"])):
        lines += ["", title, *(f"  {line}" for line in block(text, width - 2))]
    return "\n".join([*lines, "", *token_lines(row, pieces=pieces, most=tokens)])


def token_lines(row: dict[str, Any], *, pieces: Piece | None, most: int | None) -> list[str]:
    policies = token_policies(row)
    ratios = token_ratios(row)
    headings = ["#", "token", "piece", "version", "log-prob", "learner's", "ratio", "entropy", "factor", "kept"]
    shown = row["tokens"] if most is None else min(most, row["tokens"])
    cells = []
    for at in range(shown):
        token = row["token_ids"][at]
        kept = _at(row["kept"], at)
        cells.append(
            [str(at), str(token), "" if pieces is None else repr(plain(pieces(token), 18)), policies[at], number(row["logprobs"][at]),
             number(_at(row["learner_logprobs"], at)), number(ratios[at] if ratios else None), number(_at(row["entropy"], at)),
             number(_at(row["factor"], at)), UNKNOWN if kept is None else "yes" if kept else "no"]
        )  # fmt: skip
    drop = {i for i, name in enumerate(headings) if name == "piece" and pieces is None}
    if row["learner_logprobs"] is None:
        drop |= {i for i, name in enumerate(headings) if name in ("learner's", "ratio", "entropy", "factor", "kept")}
    keep = [i for i in range(len(headings)) if i not in drop]
    lines = table(
        [headings[i] for i in keep],
        [[line[i] for i in keep] for line in cells],
        left=(keep.index(2),) if 2 in keep else (),
    )
    if shown < row["tokens"]:
        lines.append(f"... {row['tokens'] - shown} more; --all-tokens shows them")
    return lines


def render_group(rows: Sequence[dict[str, Any]], *, width: int, most_lines: int | None = 40) -> str:
    """The rollouts side by side, as many in a row as fit."""
    first = rows[0]
    lines = [
        f"{plain(first['group_id'])}: group {first['group_index']}, attempt {first['attempt']}, {len(rows)} of {first['group_size']} rollouts, "
        f"{fate(first['fate'])}" + ("" if first["step"] is None else f" in step {first['step']}"),
        f"answer {plain(first['answer'], max(20, width - 8))}",
        "",
        *block(first["prompt_text"], width, most=12),
    ]
    narrowest = 28
    beside = max(1, min(len(rows), (width + 3) // (narrowest + 3)))
    column = (width + 3) // beside - 3
    for at in range(0, len(rows), beside):
        part = [_column(row, column, most_lines) for row in rows[at : at + beside]]
        lines.append("")
        for cells in itertools.zip_longest(*part, fillvalue=""):
            lines.append(" │ ".join(fit(cell, column) for cell in cells).rstrip())
    return "\n".join(lines)


def _column(row: dict[str, Any], width: int, most_lines: int | None) -> list[str]:
    advantage = "" if row["advantage"] is None else f"  advantage {row['advantage']:+.3g}"
    kept = (
        "" if row["kept_fraction"] is None else f"ratio {number(row['ratio_mean'], 3)}, {row['kept_fraction']:.0%} kept"
    )
    head = [
        f"/{row['sample_index']}  reward {number(row['reward'])}{advantage}",
        f"{row['tokens']} tokens, {plain(row['finish_reason'])}, {versions(row)}",
        kept,
        "─" * width,
    ]
    return [*head, *block(row["text"], width, most=most_lines)]


def _at(values: Sequence[Any] | None, at: int) -> Any:
    return None if values is None else values[at]
