"""`anabranch weights` as a user runs it, over a channel on a real Valkey."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from anabranch.deploy.weights_keys import keygen
from anabranch.schemas.metrics import LearnerStatus, ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.redis_boards import RedisRunBoard
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.commands import anabranch
from tests.unit.deploy.weights_channels import Made, digest_of, usual

pytestmark = pytest.mark.process
Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def made(client, keys) -> Made:
    return usual(RedisWeightChannel(client, keys), keys.run)


@pytest.fixture
def settings(valkey, keys) -> list[str]:
    return ["--set", f"run.name={keys.run}", "--set", f"hub.url={valkey.url}", "--set", "channel.connect_deadline_s=5"]


def command(*argv: str) -> list[str]:
    return [sys.executable, "-I", "-m", "anabranch.cli.main", "weights", *argv]


@pytest.fixture
def weights(settings) -> Run:
    def run(*argv: str) -> subprocess.CompletedProcess:
        return anabranch("weights", *argv, *settings)

    return run


def shown(done: subprocess.CompletedProcess) -> str:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(done: subprocess.CompletedProcess) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    assert done.stderr.startswith("anabranch weights: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr


def test_looking(made, weights):
    log = shown(weights("log", "--last", "3")).splitlines()
    assert [line.split()[0] for line in log] == ["version", "e2.v6", "e2.v7", "e2.v8"]
    rows = [json.loads(line) for line in shown(weights("log", "--json")).splitlines()]
    assert [row["version"] for row in rows] == [str(policy) for policy in sorted(made.states)]
    assert json.loads(shown(weights("show", "head", "--json")))["version"] == "e2.v8"
    path = json.loads(shown(weights("path", "e1.v4", "e1.v8", "--json")))
    assert path["path"]["fetches"] == 1
    assert refused(weights("show", "99")) == (
        2, "anabranch weights: e2.v99 is not on the channel, which holds e1.v0 to e1.v8, e2.v5 to e2.v8\n",
    )  # fmt: skip


def test_pins_are_shown_by_the_log(made, weights):
    assert "pinned e1.v3" in shown(weights("pin", "e1.v3", "--note", "best so far"))
    assert "[pinned: best so far]" in shown(weights("log"))
    assert "unpinned" in shown(weights("unpin", "e1.v3"))
    code, line = refused(weights("unpin", "e1.v3"))
    assert code == 2
    assert "e1.v3 is not pinned" in line


def test_verifying_names_what_is_broken(made, weights, client, keys):
    assert "20 decoded" in shown(weights("verify"))
    (manifest,) = made.channel.manifests([(PolicyVersion(1, 8), "skip4")])
    client.set(keys.blob(manifest.chunks[0].digest), b"something else")
    done = weights("verify")
    code, line = refused(done)
    assert code == 76
    assert manifest.chunks[0].digest[:16] in line
    assert "BROKEN: e1.v8 skip4: " in done.stdout
    shown(weights("verify", "--from", "e2.v6"))


def test_a_forged_signature_is_found(made, weights, tmp_path):
    key = keygen(tmp_path / "key.pem").partition("public key ")[2].split()[0]
    assert "followers REFUSE it" in shown(weights("show", "head", "--set", f'channel.trusted_keys=["{key}"]'))
    code, line = refused(weights("verify", "--chunks-only", "--set", f'channel.trusted_keys=["{key}"]'))
    assert code == 76
    assert "it is not signed" in line


def test_producers_are_asked_and_their_answers_compared(made, settings, client, keys):
    board = RedisRunBoard(client, keys)
    status = ProducerStatus(updated_ms=0, region="eu", pid=1, state="sampling", policy="e2.v8")
    board.report_producer("eu-0", status)
    argv = command("verify", "--producers", "--deadline", "30", *settings)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 30
        while (token := board.verification_wanted()) is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        answer = {
            "verified_token": token, "verified_policy": "e2.v7",
            "verified_digest": digest_of(made.states[PolicyVersion(2, 7)]),
        }  # fmt: skip
        board.report_producer("eu-0", status.model_copy(update=answer))
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[1].split() == ["eu-0", "e2.v7", answer["verified_digest"][:12], "right"]


def test_followers(made, weights, client, keys):
    status = ProducerStatus(updated_ms=0, region="eu", pid=1, state="sampling", policy="e2.v6", last_error="why not")
    RedisRunBoard(client, keys).report_producer("eu-0", status)
    made.channel.lease("eu-0", PolicyVersion(2, 6), ttl_ms=60_000)
    (follower,) = json.loads(shown(weights("followers", "--json")))["followers"]
    assert (follower["version"], follower["versions_behind"], follower["last_error"]) == ("e2.v6", 2, "why not")
    assert "eu-0: why not" in shown(weights("followers"))


def test_a_rollback_needs_a_yes_and_no_learner_at_work(made, weights, client, keys):
    done = weights("rollback", "e1.v3")
    assert done.returncode == 2
    assert "give --yes" in done.stderr
    now_ms = time.time_ns() // 1_000_000
    learner = LearnerStatus(updated_ms=now_ms, state="stepping", step=8, steps_total=9, epoch=2, version=8)
    RedisRunBoard(client, keys).report_learner(learner)
    code, line = refused(weights("rollback", "e1.v3", "--yes"))
    assert code == 75
    assert "give --force" in line
    assert made.channel.head() == PolicyVersion(2, 8)
    assert "the head is e3.v3, not signed" in shown(weights("rollback", "e1.v3", "--yes", "--force"))
    assert made.channel.head() == PolicyVersion(3, 3)
    assert "21 decoded" in shown(weights("verify"))


def test_collecting(made, weights):
    before = made.channel.index()
    assert "would go" in shown(weights("gc", "--bytes", "0", "--dry-run", "--orphans"))
    assert made.channel.index() == before
    assert "bytes over it" in shown(weights("gc", "--bytes", "0"))
    assert len(made.channel.index()) < len(before)
    assert "intact" in shown(weights("verify"))


@pytest.fixture
def following(settings) -> Iterator[subprocess.Popen]:
    argv = command("log", "--follow", "--json", *settings)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_following_goes_on_until_it_is_interrupted(following, client, keys):
    made = Made(RedisWeightChannel(client, keys), keys.run)
    made.begin()
    made.step()
    told = [json.loads(following.stdout.readline())["version"] for _ in range(2)]
    made.step()
    told.append(json.loads(following.stdout.readline())["version"])
    assert told == ["e1.v0", "e1.v1", "e1.v2"]
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == 130
    assert following.stderr.read() == ""


def test_nothing_is_published_yet(weights, keys):
    line = f"nothing is published yet for run {keys.run}"
    assert shown(weights("followers")).startswith(line)
    for argv in (
        ["log"],
        ["log", "--json"],
        ["show", "head"],
        ["verify"],
        ["path", "nothing", "head"],
        ["rollback", "3", "--yes"],
    ):
        assert refused(weights(*argv)) == (75, f"anabranch weights: {line}\n")
    assert shown(weights("gc"))


def test_a_head_that_is_not_readable_is_told_beside_all_else(made, weights, client, keys):
    status = ProducerStatus(updated_ms=0, region="eu", pid=1, state="sampling", policy="e2.v6", last_error="why not")
    RedisRunBoard(client, keys).report_producer("eu-0", status)
    client.set(keys.head, "not JSON")
    followers, log = weights("followers"), weights("log")
    for done in (followers, log):
        code, line = refused(done)
        assert code == 76
        assert f"the head of run '{keys.run}' is not readable" in line
        assert done.stdout.startswith("head: not readable\n")
    assert "eu-0: why not" in followers.stdout
    assert [line.split()[0] for line in log.stdout.splitlines()[2:]] == ["version", *map(str, sorted(made.states))]
    assert [json.loads(line)["head"] for line in weights("log", "--json").stdout.splitlines()] == [False] * len(
        made.states
    )
    told = json.loads(weights("followers", "--json").stdout)
    assert (told["head"], told["followers"][0]["producer"]) == (None, "eu-0")
    assert "is not readable" in told["head_error"]


def test_a_rollback_to_what_cannot_be_read_is_refused(made, weights, client, keys):
    (manifest,) = made.channel.manifests([(PolicyVersion(1, 0), "anchor")])
    client.unlink(keys.blob(manifest.chunks[0].digest))
    code, line = refused(weights("rollback", "e1.v3", "--yes"))
    assert code == 76
    assert "e1.v3 cannot become the head: e1.v0 anchor" in line
    assert made.channel.head() == PolicyVersion(2, 8)
    assert made.channel.open_epoch() == 3  # the refused one has opened none


def test_a_hub_that_is_away_is_one_line():
    away = ["--set", "hub.url=redis://:s3cret@127.0.0.1:1/0", "--set", "channel.connect_deadline_s=1"]
    done = subprocess.run(
        command("log", *away), capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )
    code, line = refused(done)
    assert code == 75
    assert "the hub's Redis" in line
    assert "s3cret" not in line
