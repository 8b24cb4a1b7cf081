"""Correctness 1: the tag is true. What the engine recorded is what transformers computes under the tagged version."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from anabranch.producers.engine import Finished
from anabranch.schemas.errors import AnabranchError, ConfigError
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from tests.e2e.conftest import MAX_SEQS
from tests.e2e.lab import Lab, prompts
from tests.tiny import EOS_ID, OTHER_EOS_ID

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]
TOLERANCE = 1e-4
TOKENS = 40


def _rollouts_with_swaps(lab: Lab, swap_every: int, seed: int, max_tokens: int = TOKENS) -> dict[str, Finished]:
    lab.begin(seed)
    lab.submit(prompts(6, 24, seed), max_tokens=max_tokens)
    done = lab.run(swap_every)
    while lab.engine.has_unfinished:
        lab.publish()
        done |= lab.run(swap_every)
    return done


def _with_wrong_tags(finished: Finished) -> Finished:
    """Each span claims the policy of the span before it."""
    spans = tuple(VersionSpan(a.policy, b.start) for a, b in zip(finished.spans, finished.spans[1:], strict=False))
    return Finished(
        finished.request_id, finished.token_ids, finished.logprobs, (finished.spans[0], *spans),
        finished.finish_reason, finished.text,
    )  # fmt: skip


def test_every_token_matches_its_version_across_swaps_when_kv_is_recomputed(recompute_lab: Lab) -> None:
    asked = prompts(6, 24, 1)
    done = _rollouts_with_swaps(recompute_lab, 10, 1)
    most_spans = max(len(f.spans) for f in done.values())
    assert most_spans >= 4, "at least three swaps in mid-rollout"
    for i, prompt in enumerate(asked):
        assert recompute_lab.judge(prompt, done[f"r{i}"]).max() < TOLERANCE
    # The judge can tell: tags shifted by one swap are far off.
    longest = max(range(6), key=lambda i: len(done[f"r{i}"].spans))
    assert recompute_lab.judge(asked[longest], _with_wrong_tags(done[f"r{longest}"])).max() > 100 * TOLERANCE


def test_kept_kv_matches_before_the_swap_and_is_the_mixed_cache_after_it(keep_lab: Lab) -> None:
    asked = prompts(6, 24, 2)
    done = _rollouts_with_swaps(keep_lab, 10, 2)
    assert max(len(f.spans) for f in done.values()) >= 4
    drift = 0.0
    for i, prompt in enumerate(asked):
        finished = done[f"r{i}"]
        fresh = keep_lab.judge(prompt, finished)
        first_swap = finished.spans[1].start if len(finished.spans) > 1 else len(fresh)
        assert fresh[:first_swap].max() < TOLERANCE
        drift = max(drift, fresh[first_swap:].max(initial=0.0))
        # Later tokens come from the tagged weights over the keys and values that older weights left: exactly those.
        assert keep_lab.judge(prompt, finished, keep_kv=True).max() < TOLERANCE
    assert drift > TOLERANCE, "weights this different must show in a fresh forward pass"


def test_new_requests_only_swaps_when_no_request_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lab.engine._config.model_copy(update={"kv_policy": "new_requests_only"})
    monkeypatch.setattr(lab.engine, "_config", config)
    first = lab.begin(12)
    asked = prompts(4, 400, 12)
    lab.submit(asked, max_tokens=10)
    done = lab.run(3)
    changed = lab.change(fraction=0.2)
    following = PolicyVersion(first.policy.epoch, first.policy.version + 1)
    with pytest.raises(AnabranchError, match=r"4 requests run under e1\.v\d+; finish them before the swap"):
        lab.engine.swap(lab.mirror, following, changed)
    assert lab.engine.policy == first.policy
    done |= lab.run()
    assert all([s.policy for s in f.spans] == [first.policy] for f in done.values())
    for i, prompt in enumerate(asked):
        assert lab.judge(prompt, done[f"r{i}"]).max() < TOLERANCE
    report = lab._swap(changed)
    lab.submit(asked, max_tokens=10, prefix="s")
    done = lab.run()
    for i, prompt in enumerate(asked):
        assert [s.policy for s in done[f"s{i}"].spans] == [report.policy]
        assert lab.judge(prompt, done[f"s{i}"]).max() < TOLERANCE, "no key of the old weights"


def test_same_seeds_and_schedule_give_the_same_rollouts(lab: Lab) -> None:
    lab.begin(3)
    runs = []
    for _ in range(2):
        lab.submit(prompts(6, 24, 3), max_tokens=TOKENS)
        runs.append(lab.run())
        lab.publish(fraction=0.0)  # new version, same weights: no cache crosses
    for name, first in runs[0].items():
        assert np.array_equal(first.token_ids, runs[1][name].token_ids)
        assert np.array_equal(first.logprobs, runs[1][name].logprobs)
    assert len({tuple(f.token_ids) for f in runs[0].values()}) == 6


def test_recomputing_kv_does_not_sample_again(recompute_lab: Lab) -> None:
    """With unchanged weights, swaps in mid-rollout leave tokens and log-probs as they are, only tags differ."""
    recompute_lab.begin(4)
    recompute_lab.submit(prompts(4, 24, 4), max_tokens=TOKENS)
    plain = recompute_lab.run()
    recompute_lab.publish(fraction=0.0)
    recompute_lab.submit(prompts(4, 24, 4), max_tokens=TOKENS)
    swapped: dict[str, Finished] = {}
    while recompute_lab.engine.has_unfinished:
        swapped |= recompute_lab.run(7)
        recompute_lab.publish(fraction=0.0)
    for name, finished in plain.items():
        assert np.array_equal(finished.token_ids, swapped[name].token_ids)
        assert np.abs(finished.logprobs - swapped[name].logprobs).max() < TOLERANCE


def test_end_of_sequence_is_a_token_with_a_log_prob(lab: Lab) -> None:
    lab.begin(5)
    asked = prompts(32, 8, 5)
    lab.submit(asked, max_tokens=200)
    done = lab.run()
    stopped = [i for i in range(32) if done[f"r{i}"].finish_reason == "stop"]
    assert stopped, "32 random rollouts of 200 tokens end by themselves now and then"
    ends = {EOS_ID, OTHER_EOS_ID} if lab.two_ends else {EOS_ID}
    assert {int(done[f"r{i}"].token_ids[-1]) for i in stopped} == ends
    assert not any(np.isin(f.token_ids[:-1], list(ends)).any() for f in done.values())
    for i in stopped:
        finished = done[f"r{i}"]
        assert len(finished.logprobs) == len(finished.token_ids)
        assert "<eos>" not in finished.text
    assert lab.judge(asked[stopped[0]], done[f"r{stopped[0]}"]).max() < TOLERANCE
    assert {f.finish_reason for f in done.values()} <= {"stop", "length"}
    assert all(len(f.token_ids) == 200 for f in done.values() if f.finish_reason == "length")


def test_the_prefix_cache_is_never_stale(lab: Lab) -> None:
    """Same long prompt before and after a swap, and in requests that wait for a slot while the swap happens."""
    lab.begin(6)
    prompt = prompts(1, 400, 6)[0]  # several KV blocks
    lab.submit([prompt] * (2 * MAX_SEQS), max_tokens=12)
    early = lab.run(3)
    report = lab.publish(fraction=0.2)
    late = lab.submit([prompt] * 2, max_tokens=12, prefix="s")
    done = early | lab.run()
    waited = [n for n, f in done.items() if f.spans[0].policy == report.policy]
    assert set(late) < set(waited), "some of the first requests had to wait for a slot"
    for name in waited:
        assert len(done[name].spans) == 1
        assert lab.judge(prompt, done[name]).max() < TOLERANCE


def test_without_the_salt_stale_keys_would_be_served(keep_lab: Lab) -> None:
    """The control of the test above: a request under the old salt, with an old one running, does read old KV."""
    keep_lab.begin(7)
    prompt = prompts(1, 400, 7)[0]
    keep_lab.submit([prompt] * 4, max_tokens=12)
    keep_lab.run(3)
    assert keep_lab.engine.has_unfinished
    keep_lab.publish(fraction=0.2)
    old = keep_lab.engine._policy
    try:
        keep_lab.engine._policy = next(p for p in keep_lab.states if p.version == old.version - 1)
        keep_lab.engine.submit("s0", prompt, seed=0, max_tokens=12)
    finally:
        keep_lab.engine._policy = old
    assert keep_lab.judge(prompt, keep_lab.run()["s0"]).max() > 10 * TOLERANCE


def test_the_models_generation_config_does_not_touch_sampling(keep_lab: Lab) -> None:
    """This checkpoint's own config asks for top_k 3: rollouts of one prompt would begin with three different tokens."""
    keep_lab.begin(11)
    prompt = prompts(1, 16, 11)[0]
    names = keep_lab.submit([prompt] * 32, max_tokens=2)
    done = keep_lab.run()
    assert len({int(f.token_ids[0]) for f in done.values()}) > 3
    assert keep_lab.judge(prompt, done[names[0]]).max() < TOLERANCE


def test_greedy_and_other_temperatures_per_request(recompute_lab: Lab) -> None:
    recompute_lab.begin(8)
    prompt = prompts(1, 16, 8)[0]
    for i in range(2):
        recompute_lab.engine.submit(f"r{i}", prompt, seed=i, max_tokens=10, temperature=0.0)
    done = recompute_lab.run()
    assert np.array_equal(done["r0"].token_ids, done["r1"].token_ids)


def test_refused_requests_leave_the_engine_serving(lab: Lab) -> None:
    assert "no policy is served yet" in lab.refused_before_first_policy
    lab.begin(9)
    lab.submit(prompts(1, 8, 9), max_tokens=4)
    with pytest.raises(AnabranchError, match="already running"):
        lab.engine.submit("r0", [1], seed=0)
    with pytest.raises(ConfigError, match="max_model_len = 640"):
        lab.engine.submit("s0", [1] * 600, seed=0, max_tokens=41)
    with pytest.raises(ConfigError, match="a prompt of 0"):
        lab.engine.submit("s0", [], seed=0)
    assert list(lab.run()) == ["r0"]


def test_aborted_requests_are_gone(lab: Lab) -> None:
    lab.begin(10)
    names = lab.submit(prompts(4, 8, 10), max_tokens=30)
    done = lab.run(3)
    lab.engine.abort([names[0], "unknown"])
    assert set(done | lab.run()) == set(names[1:])


def test_prompts_too_long_for_one_default_step_are_prefilled_whole(lab: Lab) -> None:
    """vLLM's CPU runner dies when it splits the prefill of a seeded request."""
    lab.begin(11)
    names = lab.submit(prompts(8, 600, 11), max_tokens=3)
    assert set(lab.run()) == set(names)


def test_nothing_listens_beyond_loopback(lab: Lab) -> None:
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except FileNotFoundError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # 0A: listening
                assert fields[1].split(":")[0] in ("0100007F", "00000000000000000000000001000000"), line
