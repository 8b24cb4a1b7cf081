"""What every environment hands out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt: `prompt_text` is what the model sees (before a chat template), `answer` the gold answer, `entry` what
    the scorer needs."""

    question: str
    prompt_text: str
    answer: str
    entry: dict[str, Any] = field(default_factory=dict, repr=False)
