"""A stock vLLM server in processes of its own, on a free loopback port, and what tests ask it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

READY_S = 170
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_PLUGINS": "anabranch",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
ARGUMENTS = {
    "dtype": "float32", "max-model-len": "640", "max-num-seqs": "8", "max-num-batched-tokens": "5120",
    "kv-cache-memory-bytes": str(32 * 2**20), "logprobs-mode": "processed_logprobs", "generation-config": "vllm",
    "served-model-name": "m", "weight-transfer-config": '{"backend": "anabranch"}',
}  # fmt: skip


@contextmanager
def serve(model_dir: Path, log: Path) -> Iterator[str]:
    """The URL of a server of `model_dir`. `python -m`: the `vllm` program of the vllm-cpu distribution does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [word for name, value in ARGUMENTS.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-I", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process, log)
        yield url
    finally:
        _end(process)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + READY_S
    while time.monotonic() < give_up_s:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise AssertionError(f"not ready after {READY_S} s: {log.read_text()[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server and its children: they share a process group that is theirs alone."""
    for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        give_up_s = time.monotonic() + patience_s
        while time.monotonic() < give_up_s:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
    process.wait(timeout=10)


def complete(
    url: str, prompt: Sequence[int], *, max_tokens: int, begun: threading.Event | None = None
) -> tuple[list[int], list[float]]:
    """Greedy completion: token ids and their log-probs, [T] each. Sets `begun` at the first token."""
    asked = {
        "model": "m", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0,
        "return_tokens_as_token_ids": True, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    tokens, logprobs = [], []
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            told = json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"]
            tokens += [int(t.removeprefix("token_id:")) for t in told["tokens"]]
            logprobs += [float(p) for p in told["token_logprobs"]]
            if begun is not None:
                begun.set()
    return tokens, logprobs
