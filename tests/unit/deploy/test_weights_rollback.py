from __future__ import annotations

import pytest

from anabranch.deploy.weights_keys import signature_check
from anabranch.deploy.weights_rollback import check_way, describe, plan_rollback, refuse_while_learning, roll_back
from anabranch.schemas.errors import ConfigError, ManifestError, TemporaryError, UsageError
from anabranch.schemas.metrics import LearnerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_boards import MemoryRunBoard
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.signing import Verifier, load_signer, write_key_pair
from anabranch.transport.weight_path import State, cheapest_path, path_bytes
from tests.unit.deploy.weights_channels import Made, digest_of, usual

NOW_MS = 1_700_000_000_000


@pytest.fixture
def made() -> Made:
    return usual(MemoryWeightChannel(MemoryWeightStore("r")), "r")


@pytest.fixture
def runs() -> MemoryRunBoard:
    return MemoryRunBoard()


def learner(runs: MemoryRunBoard, *, ago_ms: int, state: str = "stepping") -> None:
    runs.report_learner(
        LearnerStatus(updated_ms=NOW_MS - ago_ms, state=state, step=8, steps_total=9, epoch=2, version=8)
    )


def test_the_old_version_is_the_head_again_and_followers_get_there(made, runs):
    plan = plan_rollback(made.channel, runs, "r", "e1.v3")
    fork = roll_back(made.channel, "r", plan, None, signature_needed=False)
    head = PolicyVersion(3, 3)
    assert made.channel.head() == fork.policy == head
    assert (fork.kind, fork.chunks, fork.base.policy, fork.learner_step) == ("fork", (), PolicyVersion(1, 3), 3)
    assert fork.fork_version == 3
    served = PolicyVersion(2, 8)
    way = cheapest_path(made.channel.index(), State(served, digest_of(made.states[served])), head)
    assert way[-1].label == "fork"
    assert path_bytes(way) == plan.cost_bytes > 0
    at_hand = State(PolicyVersion(1, 3), digest_of(made.states[PolicyVersion(1, 3)]))
    assert cheapest_path(made.channel.index(), at_hand, head) == []


def test_the_learner_of_before_is_fenced_and_the_next_one_goes_on(made, runs):
    roll_back(made.channel, "r", plan_rollback(made.channel, runs, "r", "7"), None, signature_needed=False)
    with pytest.raises(ConfigError, match="epoch 3 has been opened"):
        made.step()
    made.fork(PolicyVersion(2, 7))
    assert made.channel.head() == PolicyVersion(4, 7)


def test_it_says_what_will_happen(made, runs):
    text = describe(plan_rollback(made.channel, runs, "r", "e1.v3"))
    assert "e1.v3 becomes the head, in a new epoch" in text
    assert "anabranch checkpoints --give-up-above 3" in text
    assert "if the run directory still has a checkpoint at or below step 3" in text  # it is pruned; nothing is promised
    assert "publishes it in a further epoch" in text


@pytest.mark.parametrize(("ago_ms", "state", "at_work"), [
    (29_000, "stepping", True), (-60_000, "stepping", True), (31_000, "stepping", False), (1_000, "done", False), (1_000, "stopped", False),
])  # fmt: skip
def test_a_learner_at_work_is_told_and_refused(made, runs, ago_ms, state, at_work):
    learner(runs, ago_ms=ago_ms, state=state)
    plan = plan_rollback(made.channel, runs, "r", "e1.v3", now_ms=NOW_MS)
    if not at_work:
        refuse_while_learning(plan)
        assert "exit 78" not in describe(plan)
        return
    assert "it ends with exit 78 at its next commit" in describe(plan)
    with pytest.raises(TemporaryError, match=r"a learner works on this run \(at e2.v8, stepping.*give --force"):
        refuse_while_learning(plan)


def test_what_followers_could_not_reach_or_have_already_is_refused(made, runs):
    with pytest.raises(UsageError, match=r"the head is e2.v8, which is the state of e2.v8 already"):
        plan_rollback(made.channel, runs, "r", "head")
    with pytest.raises(UsageError, match=r"e1.v77 is not on the channel"):
        plan_rollback(made.channel, runs, "r", "e1.v77")
    store = made.channel._store
    for name in ((PolicyVersion(1, 0), "anchor"),):
        del store.entries[name], store.manifests[name]
    with pytest.raises(ManifestError, match=r"no path leads to e1.v3 from nothing"):
        plan_rollback(made.channel, runs, "r", "e1.v3")
    roll_back(made.channel, "r", plan_rollback(made.channel, runs, "r", "e1.v6"), None, signature_needed=False)
    with pytest.raises(UsageError, match=r"the head is e3.v6, which is the state of e1.v6 already"):
        plan_rollback(made.channel, runs, "r", "e1.v6")


def test_it_is_signed_where_followers_want_that(made, runs, tmp_path):
    plan = plan_rollback(made.channel, runs, "r", "e1.v3")
    with pytest.raises(ConfigError, match=r"channel.trusted_keys is set"):
        roll_back(made.channel, "r", plan, None, signature_needed=True)
    assert made.channel.head() == PolicyVersion(2, 8)  # and no epoch was opened
    made.step()
    public = write_key_pair(tmp_path / "key.pem")
    roll_back(made.channel, "r", plan, load_signer(tmp_path / "key.pem"), signature_needed=True)
    (stored,) = made.channel.manifests([(PolicyVersion(3, 3), "fork")])
    Verifier([public]).check(stored)


def test_a_version_that_left_meanwhile_changes_nothing(made, runs):
    plan = plan_rollback(made.channel, runs, "r", "e1.v3")
    store = made.channel._store
    for name in [name for name in store.entries if name[0] == PolicyVersion(1, 3)]:
        del store.entries[name], store.manifests[name]
    with pytest.raises(UsageError, match=r"e1.v3 is not on the channel"):
        roll_back(made.channel, "r", plan, None, signature_needed=False)
    assert store.epoch == 2


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_way_with_a_chunk_missing_or_damaged_is_refused(made, runs, version):
    plan = plan_rollback(made.channel, runs, "r", "e1.v3")
    assert [entry.policy.version for entry in plan.way] == [0, 2, 3]
    check_way(made.channel, plan, check_signature=signature_check(()), threads=3)
    label = next(entry.label for entry in plan.way if entry.policy.version == version)
    (manifest,) = made.channel.manifests([(PolicyVersion(1, version), label)])
    held = made.channel._store.blobs.chunks
    content = held.pop(manifest.chunks[-1].digest)
    with pytest.raises(ManifestError, match=rf"e1.v3 cannot become the head: e1.v{version} {label}.* is not in"):
        check_way(made.channel, plan, check_signature=signature_check(()), threads=3)
    held[manifest.chunks[-1].digest] = content[:-1]
    with pytest.raises(ManifestError, match=r"was altered.*choose another version"):
        check_way(made.channel, plan, check_signature=signature_check(()), threads=3)


def test_a_way_that_followers_would_not_take_is_refused(made, runs, tmp_path):
    plan = plan_rollback(made.channel, runs, "r", "e1.v3")
    key = write_key_pair(tmp_path / "key.pem")
    with pytest.raises(ManifestError, match=r"e1.v0 anchor.*it is not signed"):
        check_way(made.channel, plan, check_signature=signature_check([key]), threads=1)
    assert made.channel.head() == PolicyVersion(2, 8)
