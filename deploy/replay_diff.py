"""`anabranch replay diff`: two trajectories, and where they part.

Invariant: the part that is called common is equal token for token, and the next token differs or one of the two has ended. Held by
tests/unit/deploy/test_replay_diff.py.
"""

from __future__ import annotations

from typing import Any

from anabranch.consumers.token_values import Piece, token_policies
from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_text import UNKNOWN, block, fate, number, table, versions

_SAME = ("group_index", "attempt", "prompt_token_ids", "answer")


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """`common_tokens`: of the completions; `same_prompt`; and both sides' figures."""
    pairs = zip(a["token_ids"], b["token_ids"], strict=False)
    common = next((i for i, (x, y) in enumerate(pairs) if x != y), min(a["tokens"], b["tokens"]))
    names = ("id", "fate", "step", "age", "reward", "advantage", "tokens", "finish_reason", "epoch_min", "epoch", "version_min", "version_max", "ratio_mean", "kept_fraction")  # fmt: skip
    shared = range(common)
    policies = token_policies(a), token_policies(b)
    return {
        "same_prompt": a["prompt_token_ids"] == b["prompt_token_ids"],
        "common_tokens": common,
        "largest_logprob_difference": max((abs(a["logprobs"][i] - b["logprobs"][i]) for i in shared), default=None),
        "other_version_from": next((i for i in shared if policies[0][i] != policies[1][i]), None),
        "a": {name: a[name] for name in names},
        "b": {name: b[name] for name in names},
    }


def render(a: dict[str, Any], b: dict[str, Any], *, width: int, pieces: Piece | None = None, tokens: int = 16) -> str:
    found = compare(a, b)
    rows = [
        ["id", plain(a["id"]), plain(b["id"])],
        ["fate", fate(a["fate"]), fate(b["fate"])],
        *([name, number(a[name]), number(b[name])] for name in ("step", "age", "reward", "advantage", "tokens", "ratio_mean", "kept_fraction")),
        ["ended by", plain(a["finish_reason"]), plain(b["finish_reason"])],
        ["sampled by", versions(a), versions(b)],
    ]  # fmt: skip
    lines = table(["", "A", "B"], rows, left=(0, 1, 2))
    lines += ["", f"prompts: {'the same' if found['same_prompt'] else 'different'}"]
    at = found["common_tokens"]
    if at == a["tokens"] == b["tokens"]:
        lines.append(f"completions: the same {at} tokens")
    else:
        lines.append(f"completions: {at} tokens in common, then they part")
    if found["largest_logprob_difference"] is not None:
        lines.append(f"log-probs of the common tokens differ by at most {number(found['largest_logprob_difference'])}")
    if found["other_version_from"] is not None:
        lines.append(f"other versions sampled them from token {found['other_version_from']} on")
    if at < max(a["tokens"], b["tokens"]):
        lines += ["", *_tokens(a, b, at, pieces, tokens)]
        for name, row in (("A", a), ("B", b)):
            lines += ["", name, *(f"  {line}" for line in block(row["text"], width - 2, most=20))]
    return "\n".join(lines)


def _tokens(a: dict[str, Any], b: dict[str, Any], at: int, pieces: Piece | None, most: int) -> list[str]:
    cells = []
    policies = token_policies(a), token_policies(b)
    for i in range(max(0, at - 3), min(max(a["tokens"], b["tokens"]), at + most)):
        line = [str(i)]
        for row, policy in zip((a, b), policies, strict=True):
            if i < row["tokens"]:
                token = row["token_ids"][i]
                piece = "" if pieces is None else f" {plain(pieces(token), 18)!r}"
                line += [f"{token}{piece}", number(row["logprobs"][i]), policy[i]]
            else:
                line += [UNKNOWN] * 3
        cells.append([*line, "" if i < at else "≠" if i == at else ""])
    return table(["#", "A", "log-prob", "version", "B", "log-prob", "version", ""], cells, left=(1, 4))
