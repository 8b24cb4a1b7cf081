"""A stock vLLM server, updated over HTTP: it computes with the weights it claims, whatever goes wrong in between."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from anabranch.kernels.delta_codec import TensorChange
from anabranch.producers.mirror import Mirror
from anabranch.producers.server_swap import ServerSwap, SwapState
from anabranch.producers.vllm_server import VllmServer
from anabranch.schemas.errors import ConfigError, DeltaError, ModelMismatchError, TemporaryError
from anabranch.schemas.keys import Keys
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_boards import RedisRunBoard
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from tests.e2e.lab import prompts
from tests.e2e.vllm_process import complete, serve
from tests.tiny import build_checkpoint
from tests.weights import Publisher, digest_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
TOLERANCE = 1e-4


@dataclass
class Server:
    """A server with the mirror of what it serves. Tests share it: each leaves it serving what its mirror holds."""

    url: str
    model_dir: Path
    mirror: Mirror
    client: VllmServer
    swap: ServerSwap
    version: int = 0

    def publish(self, seed: int, fraction: float = 0.05) -> float:
        """Swap in the next version, with `fraction` of every tensor's elements changed to others of its values."""
        rng, changes = np.random.default_rng(seed), []
        for spec in self.mirror.layout.tensors:
            where = np.flatnonzero(rng.random(spec.numel) < fraction).astype(np.int64)
            bits = self.mirror.tensor_bits(spec.name)
            changes.append(TensorChange(spec.name, where, rng.permutation(bits)[: len(where)].copy()))
        self.mirror.apply(changes)
        self.version += 1
        return self.swap.swap(self.mirror, self.policy, {c.name: c.indices for c in changes})

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(1, self.version)

    def off_by(self, prompt: list[int], *, max_tokens: int = 12) -> float:
        """Largest |log-prob that the server told − that of transformers with the mirror's weights| of a greedy completion."""
        tokens, told = complete(self.url, prompt, max_tokens=max_tokens)
        assert len(tokens) == max_tokens
        return self.judge(prompt, tokens, told)

    def judge(self, prompt: list[int], tokens: list[int], told: list[float]) -> float:
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        state = {
            spec.name: torch.from_numpy(self.mirror.tensor_bits(spec.name).copy()).view(torch.bfloat16).view(spec.shape).float()
            for spec in self.mirror.layout.tensors
        }  # fmt: skip
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        with torch.no_grad():
            logits = model.eval()(torch.tensor([[*prompt, *tokens]])).logits[0]
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        mine = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return float(np.abs(mine.numpy() - np.array(told)).max())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    model_dir = build_checkpoint(folder / "model", family="qwen3", tied=True)
    with serve(model_dir, folder / "server.log") as url:
        mirror, client = Mirror.from_checkpoint(model_dir), VllmServer(url)
        server = Server(url, model_dir, mirror, client, ServerSwap(client, model_dir, mirror.layout))
        server.swap.attach()
        server.publish(0, fraction=0.0)
        yield server
        server.swap.close()
        client.close()


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    yield running
    assert running.swap.state is SwapState.SERVING
    assert running.client.weight_version() == str(running.policy)
    assert running.swap.live_digest() == running.mirror.digest()
    assert httpx.get(f"{running.url}/is_paused", timeout=10).json() == {"is_paused": False}


def test_what_it_computes_follows_each_update(server: Server) -> None:
    prompt = prompts(1, 24, 1)[0]
    assert server.off_by(prompt) < TOLERANCE
    answers = set()
    for seed in (11, 12, 13):
        server.publish(seed)
        tokens, told = complete(server.url, prompt, max_tokens=12)
        assert server.judge(prompt, tokens, told) < TOLERANCE
        assert server.swap.live_digest() == server.mirror.digest()
        answers.add(tuple(told))
    assert len(answers) == 3


def test_requests_that_run_survive_updates_with_all_their_tokens(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six clients ask without a pause until the updates are over, however fast either is. No two ask for the same
    length: they do not end in step, so at any moment requests run."""
    over = threading.Event()
    moments: list[float] = []  # of pausing and resuming, in turn
    answers: list[tuple[float, float, int, int]] = []  # from, until, tokens asked for, tokens

    def ask(prompt: list[int], max_tokens: int) -> None:
        while not over.is_set():
            began = time.monotonic()
            tokens, _ = complete(server.url, prompt, max_tokens=max_tokens)
            answers.append((began, time.monotonic(), max_tokens, len(tokens)))

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **more: [moments.append(time.monotonic()), call(*args, **more)][1]

    monkeypatch.setattr(server.client, "pause", timed(server.client.pause))
    monkeypatch.setattr(server.client, "resume", timed(server.client.resume))
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, prompt, 250 + 50 * i) for i, prompt in enumerate(prompts(6, 24, 2))]
        try:
            for seed in (21, 22, 23):
                _wait_for_more(answers, asked)
                server.publish(seed)
        finally:
            over.set()
    for each in asked:
        each.result()
    assert [got for *_, got in answers] == [wanted for *_, wanted, _ in answers]
    assert len(moments) == 6
    for paused, resumed in zip(moments[::2], moments[1::2], strict=True):
        assert any(start < paused and end > resumed for start, end, *_ in answers), "none ran when it was updated"


def _wait_for_more(answers: list[tuple[float, float, int, int]], asked: list[Future[None]]) -> None:
    had, give_up_s = len(answers), time.monotonic() + 60
    while len(answers) == had:
        assert not any(each.done() for each in asked), "a client has ended"
        assert time.monotonic() < give_up_s, f"no answer but {had} in 60 s"
        time.sleep(0.01)


def test_the_prefix_cache_is_never_stale(server: Server) -> None:
    prompt = prompts(1, 400, 3)[0]
    complete(server.url, prompt, max_tokens=4)
    server.publish(31)
    assert server.off_by(prompt) < TOLERANCE


def test_without_the_reset_stale_keys_would_be_served(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    prompt = prompts(1, 400, 4)[0]
    complete(server.url, prompt, max_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(server.client, "reset_prefix_cache", lambda: None)
        server.publish(41)
    assert server.off_by(prompt) > 10 * TOLERANCE
    server.publish(42)
    assert server.off_by(prompt) < TOLERANCE


def test_a_refused_update_leaves_the_old_version_serving(server: Server) -> None:
    before, layout = server.mirror.digest(), server.mirror.layout
    ahead = Mirror.from_checkpoint(server.model_dir)
    everything = dict.fromkeys(layout.by_name)
    with pytest.raises(DeltaError, match=r"model\.norm\.weight: an index is outside"):
        server.swap.swap(ahead, PolicyVersion(9, 9), {**everything, "model.norm.weight": np.array([64])})
    with pytest.raises(ModelMismatchError, match="'nobody'"):
        server.swap.swap(ahead, PolicyVersion(9, 9), {**everything, "nobody": None})
    other = Mirror(Layout.build([(t.name, t.dtype, t.shape) for t in layout.tensors][1:]))
    with pytest.raises(ModelMismatchError, match="tensor '"):
        server.swap.swap(other, PolicyVersion(9, 9), {})
    for bad in ({"mirror_path": ahead.path}, {"stray": 1}, {"mirror_path": 1, "layout_hash": "", "changed": [[1, 2]]}):
        with pytest.raises(DeltaError):
            server.client.ask("anabranch_stage", update_info=bad)
    assert server.swap.state is SwapState.SERVING
    assert server.swap.live_digest() == before


def test_a_swap_that_fails_while_writing_keeps_it_paused_until_one_succeeds(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(version: str, **_: object) -> None:
        raise TemporaryError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(server.client, "finish_weight_update", broken)
        with pytest.raises(TemporaryError, match="the connection broke"):
            server.publish(51)
    assert server.swap.state is SwapState.TORN
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"model": "m", "prompt": [1], "max_tokens": 1}, timeout=0.5)
    server.publish(52, fraction=0.001)  # all of it is written, not this change alone
    assert server.off_by(prompts(1, 24, 5)[0]) < TOLERANCE


def test_live_weights_that_are_not_what_the_channel_says_are_not_served(server: Server) -> None:
    with pytest.raises(DeltaError, match="digest of the live weights"):
        server.swap.swap(server.mirror, server.policy, {}, verify="0" * 32)
    assert server.swap.state is SwapState.TORN
    server.version += 1
    server.swap.swap(server.mirror, server.policy, {}, verify=server.mirror.digest())


def test_a_restarted_server_is_noticed_and_gets_everything(server: Server) -> None:
    """A server that has been restarted says "default" and knows nothing of us."""
    httpx.post(f"{server.url}/update_weight_version", json={"new_version": "default"}, timeout=10).raise_for_status()
    server.swap.check_server()
    assert server.swap.state is SwapState.DETACHED
    server.swap.attach()
    server.publish(61, fraction=0.001)
    assert server.off_by(prompts(1, 24, 6)[0]) < TOLERANCE


def test_what_an_earlier_client_left_unfinished_is_dropped(server: Server) -> None:
    ahead = Mirror.from_checkpoint(server.model_dir)
    half = server.swap._memory.message(ahead, dict.fromkeys(ahead.layout.by_name))
    server.client.start_weight_update()
    server.client.update_weights(half)
    late = ServerSwap(server.client, server.model_dir, server.mirror.layout)
    late.attach()
    server.version += 1
    late.swap(server.mirror, server.policy, {})
    assert late.live_digest() == server.mirror.digest()
    server.swap.attach()
    server.publish(71)


def test_policies_that_end_or_keep_running_requests(server: Server) -> None:
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        ServerSwap(server.client, server.model_dir, server.mirror.layout, kv_policy="keep").attach()
    ending = ServerSwap(server.client, server.model_dir, server.mirror.layout, kv_policy="new_requests_only")
    ending.attach()
    prompt, done = prompts(1, 24, 8)[0], []
    begun = threading.Event()
    thread = threading.Thread(target=lambda: done.append(complete(server.url, prompt, max_tokens=600, begun=begun)))
    thread.start()
    assert begun.wait(60), "no first token in 60 s"
    before = Server(server.url, server.model_dir, Mirror.from_checkpoint(server.model_dir), server.client, server.swap)
    for spec in server.mirror.layout.tensors:
        before.mirror.write(spec.name, None, server.mirror.tensor_bits(spec.name).copy())
    changed = {}
    for spec in server.mirror.layout.tensors:
        bits = server.mirror.tensor_bits(spec.name)
        server.mirror.write(spec.name, None, np.random.default_rng(9).permutation(bits))
        changed[spec.name] = None
    server.version += 1
    ending.swap(server.mirror, server.policy, changed)
    thread.join(60)
    tokens, told = done[0]
    assert len(tokens) == 600
    assert before.judge(prompt, tokens, told) < TOLERANCE, "it ended under the weights that it began with"
    assert server.off_by(prompt) < TOLERANCE
    server.swap.attach()
    server.publish(81)


def test_a_server_of_another_checkpoint_is_refused(server: Server, tmp_path: Path) -> None:
    other = build_checkpoint(tmp_path / "other", family="qwen3", tied=True, seed=5)
    with pytest.raises(ModelMismatchError, match="does not hold the values"):
        ServerSwap(server.client, other, server.mirror.layout).attach()
    server.swap.attach()
    server.publish(91)


def _wait_for(server: Server, version: str) -> None:
    give_up_s = time.monotonic() + 60
    while (serves := server.client.weight_version()) != version:
        assert time.monotonic() < give_up_s, f"it serves {serves}, not {version}"
        time.sleep(0.05)


def test_the_command_follows_a_run_over_its_own_death(server: Server, valkey: EmbeddedValkey, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f"""
        run.name = "followed"
        model.path = "{server.model_dir}"
        hub.url = "{valkey.url}"
        regions.east.url = "{valkey.url}"
        producer.node_dir = "{tmp_path / "node"}"
        producer.poll_ms = 20
        """
    )
    argv = [sys.executable, "-I", "-m", "anabranch.cli.main", "follow", "--config", str(config), "--region", "east"]
    argv += ["--server", server.url, "--verify-every", "2"]
    client = connect(valkey.url, deadline_s=10, what="the test Valkey")
    publisher = Publisher(RedisWeightChannel(client, Keys("followed")), server.mirror.layout, run="followed")
    publisher.open(state={t.name: server.mirror.tensor_bits(t.name).copy() for t in server.mirror.layout.tensors})
    prompt, processes = prompts(1, 24, 9)[0], []
    try:
        for life in range(2):
            with (tmp_path / f"{life}.log").open("w") as log:
                processes.append(subprocess.Popen(argv, stderr=log))
            _wait_for(server, str(publisher.head))
            for _ in range(2):
                publisher.step(density=0.05)
                _wait_for(server, str(publisher.head))
            for name, bits in publisher.state.items():
                server.mirror.write(name, None, bits)
            assert server.off_by(prompt) < TOLERANCE
            if life == 0:
                processes[0].kill()
        give_up_s = time.monotonic() + 30
        while True:
            lines = RedisRunBoard(client, Keys("followed")).producers()
            (status,) = [s for s in lines.values() if s.pid == processes[1].pid]
            if status.policy == str(publisher.head) or time.monotonic() > give_up_s:
                break
            time.sleep(0.1)
        assert (status.policy, status.region, status.last_error) == (str(publisher.head), "east", "")
        assert status.verified_digest == digest_of(
            publisher.states[PolicyVersion.parse(status.verified_policy)], publisher.layout
        )
        processes[1].terminate()
        assert processes[1].wait(30) == 0, (tmp_path / "1.log").read_text()[-2000:]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
        client.close()
    server.swap.attach()
    server.publish(101)
