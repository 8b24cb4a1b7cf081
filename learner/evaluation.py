"""Held-out evaluation of one policy version, done by the producers that serve it.

Invariant: a shard's result counts only if the producer served exactly the policy asked for while it sampled; the
result covers every held-out prompt or there is none. Held by tests/unit/learner/test_evaluation.py.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import DeadlineError, StreamUnavailableError, WireError
from anabranch.schemas.metrics import EvaluationRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.retry import retry_until, sleep_alive
from anabranch.transport.wiring import Hub

SHARDS = 8
POLL_S = 0.1


def evaluate(
    hub: Hub,
    config: RunConfig,
    policy: PolicyVersion,
    *,
    waiting: Callable[[str], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    heartbeat: Callable[[], object] = lambda: None,
) -> EvaluationRecord | None:
    """Mean reward of `policy` on the held-out set; None if `should_stop()` turned true; either way nothing is
    asked for any more then.

    Raises:
        DeadlineError: not all shards came back within `learner.evaluate_deadline_s`.
        WireError: a result that is not a list of finite rewards of the right length.
    """
    started = time.monotonic()
    shards = min(SHARDS, config.task.heldout_size)
    deadline_s = config.channel.connect_deadline_s
    board = hub.evaluations
    on_hub = partial(retry_until, deadline_s=deadline_s, sleep=sleep_alive(heartbeat))
    on_hub(lambda: board.request(policy, shards), what="the hub, to ask for an evaluation")
    while True:
        if should_stop():
            with contextlib.suppress(StreamUnavailableError):  # once: what is asked for now has nobody who waits for it
                board.clear()
            return None
        results = on_hub(lambda: board.results(policy), what="the hub, to read an evaluation")
        if len(results) == shards:
            break
        elapsed = time.monotonic() - started
        what = f"held-out results of {policy}: {len(results)} of {shards} shards"
        if elapsed > config.learner.evaluate_deadline_s:
            raise DeadlineError.waiting_for(what, elapsed, "are the producers running? see their status and logs")
        waiting(what)
        time.sleep(POLL_S)
    on_hub(board.clear, what="the hub, to end an evaluation")
    rewards: list[float] = []
    for shard in range(shards):
        expected = len(range(shard, config.task.heldout_size, shards))
        values = results[shard].get("rewards")
        if not isinstance(values, list) or len(values) != expected or not all(_finite(v) for v in values):
            raise WireError(f"evaluation of {policy}, shard {shard}: expected {expected} finite rewards")
        rewards += [float(v) for v in values]
    return EvaluationRecord(
        time_ms=time.time_ns() // 1_000_000,
        epoch=policy.epoch,
        version=policy.version,
        prompts=len(rewards),
        mean_reward=statistics.fmean(rewards),
        standard_error=statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0,
        temperature=config.task.heldout_temperature,
        seconds=time.monotonic() - started,
    )


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
