"""One timed forward and backward pass of log-probs in a process of its own: `python -m anabranch.deploy.logprobs_pass JSON`.

Invariant: what is counted as extra memory is the process's peak while it computes, less what it had after inputs were made and a
small pass had loaded and started everything; the peak of anything before is not in it. Held by
tests/process/test_bench_logprobs.py.

Prints one JSON object. Reads the peak from /proc, where Linux lets a process begin it anew.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Way = Literal["reference", "ours"]
SAMPLES = 64  # values of each result that are told, for comparing


@dataclass(frozen=True, slots=True)
class Pass:
    """What is to be computed, and how."""

    way: Way
    tokens: int
    vocabulary: int
    hidden: int
    dtype: str
    threads: int
    entropy: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """Wall seconds of both halves, seconds of processor time of both together, and bytes."""

    forward_s: float
    backward_s: float
    cpu_s: float
    extra_bytes: int
    samples: list[list[float]]  # of log-probs, and of the gradients of hidden and weight


def measure(task: Pass) -> Taken:
    import torch

    torch.set_num_threads(task.threads)
    dtype = getattr(torch, task.dtype)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(task.tokens, task.hidden, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(task.vocabulary, task.hidden, generator=g).mul_(task.hidden**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(task.vocabulary, (task.tokens,), generator=g)
    upstream = torch.randn(task.tokens, generator=g)
    few = slice(0, 64)
    small = _forward(
        task, hidden[few].detach().requires_grad_(), weight[few].detach().requires_grad_(), targets[few] % 64
    )
    small.backward(upstream[few])
    del small
    before = _begin_peak()
    times, cpu = [time.perf_counter()], time.process_time()
    logprobs = _forward(task, hidden, weight, targets)
    times.append(time.perf_counter())
    logprobs.backward(upstream)
    times.append(time.perf_counter())
    cpu = time.process_time() - cpu
    extra = _resident("VmHWM") - before
    assert hidden.grad is not None
    assert weight.grad is not None
    samples = [_sample(x) for x in (logprobs, hidden.grad, weight.grad)]
    return Taken(times[1] - times[0], times[2] - times[1], cpu, extra, samples)


def _forward(task: Pass, hidden: Any, weight: Any, targets: Any) -> Any:
    import torch

    if task.way == "ours":
        from anabranch.kernels.logprobs import chosen_logprobs

        return chosen_logprobs(hidden, weight, None, targets, temperature=1.0, entropy=task.entropy)[0]
    # Nothing that it could do without: no division by the temperature, no graph of the entropy.
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight).float(), dim=-1)
    if task.entropy:
        with torch.no_grad():
            (log_p.exp() * log_p).sum(dim=-1).neg_()
    return log_p.gather(1, targets[:, None]).squeeze(1)


def _begin_peak() -> int:
    """Forget the peak so far; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def _sample(x: Any) -> list[float]:
    flat = x.detach().flatten()
    return [float(v) for v in flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES]]


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Pass(**json.loads(sys.argv[1]))))))
