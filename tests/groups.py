"""Groups for tests: plain ones by hand, any well-formed one by hypothesis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.trajectory import Group, Rollout, encode_group
from anabranch.schemas.versions import PolicyVersion, VersionSpan


def rollout(sample: int = 0, *, tokens: int = 2, spans: tuple[VersionSpan, ...] = (), reward: float = 1.0) -> Rollout:
    return Rollout(
        sample_index=sample,
        token_ids=np.arange(1, tokens + 1, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        spans=spans or (VersionSpan(PolicyVersion(1, 0), 0),),
        reward=reward,
        finish_reason="stop",
        text="42",
        started_ms=1_000,
        finished_ms=2_000,
    )


def group(
    index: int = 0, *, version: int = 0, epoch: int = 1, run: str = "run", region: str = "east", producer: str = "p"
) -> Group:
    """Two rollouts of two tokens, all sampled by `e{epoch}.v{version}`."""
    spans = (VersionSpan(PolicyVersion(epoch, version), 0),)
    rollouts = tuple(rollout(s, spans=spans, reward=float(s)) for s in range(2))
    return Group(run, region, producer, index, 0, np.array([5, 6], np.int32), "6 * 7 =", "42", rollouts)


def entry(index: int = 0, seq: int | None = None, *, producer: str = "p", **fields: object) -> Envelope:
    """The sealed form of `group(index, ...)`."""
    made = replace(group(index, producer=producer), **fields)
    return Envelope(producer, index if seq is None else seq, index, encode_group(made))


def same(a: Group, b: Group) -> bool:
    """Equality down to the bits of every array (dataclass equality does not compare arrays)."""
    return fields_of(a) == fields_of(b)


def fields_of(g: Group) -> tuple[object, ...]:
    rollouts = [
        (
            r.sample_index, r.token_ids.tobytes(), r.logprobs.tobytes(), r.spans, np.float64(r.reward).tobytes(),
            r.finish_reason, r.text, r.started_ms, r.finished_ms, r.scored_ms,
        )
        for r in g.rollouts
    ]  # fmt: skip
    return (
        g.run, g.region, g.producer, g.group_index, g.attempt, g.prompt_token_ids.tobytes(), g.prompt_text, g.answer,
        g.group_size, g.permit_ms, g.spooled_ms, tuple(rollouts),
    )  # fmt: skip


_TEXT = st.text(max_size=12)
_INDEX = st.integers(0, 2**31 - 1)


@st.composite
def rollouts(draw: st.DrawFn, sample: int) -> Rollout:
    tokens = draw(st.integers(1, 12))
    starts = sorted({0, *draw(st.lists(st.integers(0, tokens - 1), max_size=3))})
    policies = st.builds(PolicyVersion, st.integers(0, 10**6), st.integers(0, 10**12))
    return Rollout(
        sample_index=sample,
        token_ids=draw(hnp.arrays(np.int32, tokens, elements=_INDEX)),
        logprobs=draw(hnp.arrays(np.float32, tokens, elements=st.floats(-(2.0**100), 0.0, width=32))),
        spans=tuple(VersionSpan(draw(policies), start) for start in starts),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text=draw(_TEXT),
        started_ms=draw(st.integers(0, 2**62)),
        finished_ms=draw(st.integers(0, 2**62)),
        scored_ms=draw(st.integers(0, 2**62)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Any well-formed group."""
    samples = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=4, unique=True))
    return Group(
        run=draw(_TEXT),
        region=draw(_TEXT),
        producer=draw(_TEXT),
        group_index=draw(st.integers(0, 2**62)),
        attempt=draw(_INDEX),
        prompt_token_ids=draw(hnp.arrays(np.int32, st.integers(1, 8), elements=_INDEX)),
        prompt_text=draw(_TEXT),
        answer=draw(_TEXT),
        rollouts=tuple(draw(rollouts(s)) for s in samples),
        group_size=len(samples) + draw(st.integers(0, 3)),
        permit_ms=draw(st.integers(0, 2**62)),
        spooled_ms=draw(st.integers(0, 2**62)),
    )
