"""Requests that vLLM itself gives up: they end as what they are, and never as a completion with a tag."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.producers.engine import EngineState, RolloutEngine, _Request
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.versions import PolicyVersion


def engine(*outputs: Any) -> Any:
    """A `RolloutEngine` over a vLLM that answers `outputs` at the next step."""
    made: Any = RolloutEngine.__new__(RolloutEngine)
    made._state, made._policy = EngineState.SERVING, PolicyVersion(1, 0)
    made._requests = {name: _Request([1, 2], None) for name in ("a", "b")}
    made.aborted = []
    made._engine = SimpleNamespace(step=lambda: list(outputs), abort_request=made.aborted.extend)
    made._tokenizer = SimpleNamespace(decode=lambda ids, **_: "text")
    return made


def output(name: str, reason: str | None, tokens: list[int], spans: int = 1) -> SimpleNamespace:
    span = SimpleNamespace(version="e1.v0", start=0, end=len(tokens))
    completion = SimpleNamespace(
        token_ids=tokens,
        logprobs=SimpleNamespace(logprobs=[-1.0] * len(tokens)) if tokens else None,
        finish_reason=reason,
        weight_versions=[span] * spans,
    )
    return SimpleNamespace(request_id=name, outputs=[completion], finished=reason is not None)


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
@pytest.mark.parametrize("tokens", [[], [7, 8]])
def test_a_request_that_vllm_gives_up_carries_nothing_and_costs_no_other(reason: str, tokens: list[int]) -> None:
    made = engine(output("a", reason, tokens, spans=0), output("b", "length", [5]))
    failed, done = made.step()
    assert (failed.request_id, failed.finish_reason, failed.complete) == ("a", reason, False)
    assert (len(failed.token_ids), failed.spans, failed.text) == (0, (), "")
    assert (done.request_id, done.complete, done.token_ids.tolist()) == ("b", True, [5])
    assert not made.has_unfinished


def test_a_completion_without_its_tag_is_still_an_error() -> None:
    with pytest.raises(AnabranchError, match="log-probs"):
        engine(output("a", "stop", [5], spans=0)).step()


def test_abort_says_how_much_was_sampled() -> None:
    made = engine(output("a", None, [5, 6, 7]))
    assert made.step() == []
    assert made.abort(["a", "b", "unknown"]) == {"a": 3, "b": 0}
    assert (made.aborted, made.has_unfinished, made.abort(["a"])) == (["a", "b"], False, {})
