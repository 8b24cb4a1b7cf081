"""What of this machine and its programs decides the bits of a step. Pure but for looking.

Invariant: two processes on one machine, with the same packages and settings, tell the same. Held by
tests/unit/learner/test_step_facts.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("anabranch", "torch", "deepspeed", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    packages: dict[str, str]  # name -> version
    cpu: str  # its name, and the instructions that torch uses
    gpu: str  # '' for none, and for a learner that computes on the CPU


@functools.cache
def machine_facts(device: str) -> MachineFacts:
    """`device`: `learner.device`. No GPU is touched for "cpu": asking one for its name takes memory of it. Raises RuntimeError: it
    does not answer."""
    gpu = torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else ""
    versions = {name: _version(name) for name in PACKAGES} | {"torch": str(torch.__version__)}
    return MachineFacts(versions, f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}", gpu)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "?"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "?"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
