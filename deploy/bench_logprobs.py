"""`anabranch bench logprobs`: memory and time of log-probs with their backward pass, against log_softmax over logits.

Invariant: both ways take turns, each pass in a process of its own; a ratio is the median of the rounds' ratios, and how far
results are apart is told beside it. Held by tests/process/test_bench_logprobs.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from anabranch.deploy.logprobs_pass import Pass, Taken, Way
from anabranch.schemas.errors import DeadlineError, TemporaryError

MEMORY_AIM, TIME_AIM = 1 / 8, 1.0
PASS_DEADLINE_S = 1200.0
GIB = 2**30
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds; ratios are ours over the reference. Wall time is what counts, processor time is what other work
    on the machine disturbs less."""

    tokens: int
    vocabulary: int
    hidden: int
    dtype: str
    threads: int
    entropy: bool
    rounds: int
    reference: dict[str, float]  # extra_gib, forward_s, backward_s, cpu_s
    ours: dict[str, float]
    memory_ratio: float
    time_ratio: float
    cpu_ratio: float
    difference: float  # the largest, of sampled log-probs and gradients, over the largest value of each

    @property
    def kept(self) -> bool:
        """Whether both aims are met."""
        return self.memory_ratio <= MEMORY_AIM and self.time_ratio <= TIME_AIM


def measure_logprobs(
    *,
    tokens: int,
    vocabulary: int,
    hidden: int,
    dtype: str = "float32",
    threads: int = 1,
    entropy: bool = False,
    rounds: int = 3,
    tell: Tell = lambda _: None,
) -> Row:
    """
    Raises:
        TemporaryError: a pass died, of memory for example.
        DeadlineError: it took longer than PASS_DEADLINE_S.
    """
    ways: tuple[Way, Way] = ("reference", "ours")
    found: dict[Way, list[Taken]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            taken = _run(Pass(way, tokens, vocabulary, hidden, dtype, threads, entropy))
            found[way].append(taken)
            tell(
                f"round {number + 1} of {rounds}: {way} {taken.forward_s:.2f} + {taken.backward_s:.2f} s, "
                f"processor {taken.cpu_s:.2f} s, {taken.extra_bytes / GIB:.3f} GiB"
            )
    pairs = list(zip(found["ours"], found["reference"], strict=True))
    return Row(
        tokens, vocabulary, hidden, dtype, threads, entropy, rounds,
        reference=_medians(found["reference"]),
        ours=_medians(found["ours"]),
        memory_ratio=_median(a.extra_bytes / max(1, b.extra_bytes) for a, b in pairs),
        time_ratio=_median((a.forward_s + a.backward_s) / (b.forward_s + b.backward_s) for a, b in pairs),
        cpu_ratio=_median(a.cpu_s / b.cpu_s for a, b in pairs),
        difference=max(_apart(a.samples, b.samples) for a, b in pairs),
    )  # fmt: skip


def _run(task: Pass) -> Taken:
    words = [sys.executable, "-I", "-m", "anabranch.deploy.logprobs_pass", json.dumps(asdict(task))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PASS_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError.waiting_for(f"a pass of the {task.way} way", PASS_DEADLINE_S) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        raise TemporaryError(
            f"a pass of the {task.way} way ended with {done.returncode} ({last[0]}); log_softmax over logits needs "
            f"about {12 * task.tokens * task.vocabulary / GIB:.1f} GiB of free memory here"
        )
    return Taken(**json.loads(done.stdout))


def _medians(taken: Sequence[Taken]) -> dict[str, float]:
    return {
        "extra_gib": _median(t.extra_bytes / GIB for t in taken),
        **{name: _median(getattr(t, name) for t in taken) for name in ("forward_s", "backward_s", "cpu_s")},
    }


def _median(values: Any) -> float:
    return float(f"{statistics.median(values):.4g}")


def _apart(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        largest = max(abs(x) for x in other) or 1.0
        worst = max(worst, *(abs(a - b) / largest for a, b in zip(mine, other, strict=True)))
    return float(f"{worst:.2g}")


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"memory_aim": MEMORY_AIM, "time_aim": TIME_AIM, "kept": row.kept}


def table(row: Row) -> Table:
    """Both ways, and ours over the reference."""
    shown = Table(
        "", "extra memory, GiB", "forward, s", "backward, s", "processor, s",
        title=f"{row.tokens} tokens, vocabulary {row.vocabulary}, hidden {row.hidden}, {row.dtype}, "
        f"{row.threads} thread(s), {'with' if row.entropy else 'without'} entropy; medians of {row.rounds}",
    )  # fmt: skip
    for name, values in (("log_softmax over logits", row.reference), ("ours", row.ours)):
        shown.add_row(name, *(f"{values[key]:.3g}" for key in ("extra_gib", "forward_s", "backward_s", "cpu_s")))
    shown.add_row(
        "ours over it", f"{row.memory_ratio:.3f}", f"{row.time_ratio:.3f} of both", "", f"{row.cpu_ratio:.3f}",
        end_section=True,
    )  # fmt: skip
    shown.caption = f"results are {row.difference:.1g} of the largest value apart; aims: {MEMORY_AIM} and {TIME_AIM:g}"
    return shown
