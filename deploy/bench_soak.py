"""`anabranch bench soak`: memory of hub, region, producer and learner while very many small groups are delivered.

Invariant: each is a process of its own and measured alone, as resident memory; the verdict is about growth after the first
third of the run, in which tables of bounded size fill up, and the run counts only if the ledger is exact at its end.
Engine and optimizer are not in it (see `soak_actors`). Held by tests/process/test_bench_soak.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from anabranch.deploy import soak_actors
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import DeadlineError, TemporaryError
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.runtime import bound_to_parent

GROUPS_PER_STEP, CHECKPOINT_EVERY = 50, 10
SAMPLES = 400  # of a run, about
NO_PROGRESS_S, END_S = 120.0, 30.0
FLAT_BYTES, FLAT_SHARE = 2 * 2**20, 0.02  # growth below either is none
PROCESSES = ("hub", "region", "producer", "learner")


@dataclass(frozen=True, slots=True)
class Sample:
    """`resident_bytes` of each process, `used_bytes` as the servers count theirs, when so many groups had been trained."""

    groups: int
    seconds: float
    resident_bytes: dict[str, int]
    used_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, over the last two thirds of the run. `growth_bytes`: by the fitted line, over that time; `spread_bytes`:
    between the least and the most that was seen."""

    process: str
    resident_bytes: int
    bytes_per_1000_groups: float
    growth_bytes: float
    spread_bytes: int

    @property
    def flat(self) -> bool:
        return self.growth_bytes <= max(FLAT_BYTES, FLAT_SHARE * self.resident_bytes)


@dataclass(frozen=True, slots=True)
class Soak:
    groups: int
    seconds: float
    entry_bytes: int
    ledger: dict[str, Any]
    memory: tuple[Memory, ...]
    samples: tuple[Sample, ...]

    @property
    def kept(self) -> bool:
        exact = self.ledger["balanced"] and not self.ledger["pending"] and not self.ledger["alarms"]
        return bool(exact) and all(found.flat for found in self.memory)


def soak(groups: int, *, group_size: int = 4, tokens: int = 16, tell: Callable[[str], None] = lambda _: None) -> Soak:
    """Deliver `groups` (rounded up to whole steps) from one producer to one learner.

    Raises:
        DeadlineError: nothing was trained for a long time.
        TemporaryError: a process ended before its time; the message has the end of its log.
    """
    steps = -(-groups // GROUPS_PER_STEP)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            name: stack.enter_context(EmbeddedValkey(folder / name, fsync="everysec")) for name in ("hub", "region")
        }
        clients = {name: connect(server.url, deadline_s=10.0, what=name) for name, server in servers.items()}
        for client in clients.values():
            stack.callback(client.close)
        file = _write_config(folder, servers, steps=steps, group_size=group_size, tokens=tokens)
        started = time.monotonic()
        learner = stack.enter_context(_actor("learner", file, folder))
        producer = stack.enter_context(_actor("producer", file, folder))
        pids = {name: server.pid for name, server in servers.items()}
        pids |= {"producer": producer.process.pid, "learner": learner.process.pid}
        every = max(1, steps * GROUPS_PER_STEP // SAMPLES)
        samples: list[Sample] = []
        while True:
            told = learner.next_line(producer)
            if "trained" not in told:
                break
            if not samples or told["trained"] - samples[-1].groups >= every:
                resident = {name: _resident_bytes(pid) for name, pid in pids.items() if pid is not None}
                used = {name: int(client.info("memory")["used_memory"]) for name, client in clients.items()}
                samples.append(Sample(told["trained"], round(time.monotonic() - started, 3), resident, used))
                tell(f"{told['trained']:,} of {steps * GROUPS_PER_STEP:,} groups")
        seconds = time.monotonic() - started
        for actor in (learner, producer):
            actor.ends()
        entry_bytes = len(soak_actors.encode_one(load_config(file.read_text("utf-8"))))
    return Soak(
        steps * GROUPS_PER_STEP, round(seconds, 1), entry_bytes, told, tuple(judge(samples)), tuple(samples)
    )  # fmt: skip


def judge(samples: Sequence[Sample]) -> Iterator[Memory]:
    """What each process did after the first third. At least 6 samples."""
    late = samples[len(samples) // 3 :]
    groups = np.array([sample.groups for sample in late], np.float64)
    for name in PROCESSES:
        held = np.array([sample.resident_bytes[name] for sample in late], np.float64)
        slope = float(np.polyfit(groups, held, 1)[0])
        yield Memory(
            name, int(np.median(held)), round(1000 * slope, 1), round(slope * (groups[-1] - groups[0])),
            int(held.max() - held.min()),
        )  # fmt: skip


class _Actor:
    """A child and the lines it prints."""

    def __init__(self, role: str, process: subprocess.Popen[str], log: Path) -> None:
        self.role, self.process, self._log = role, process, log
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next_line(self, other: _Actor) -> dict[str, Any]:
        """Its next line; `other` must live meanwhile."""
        end = time.monotonic() + NO_PROGRESS_S
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.5)
                if line is None:
                    raise self.ended()
                told: dict[str, Any] = json.loads(line)
                return told
            if other.process.poll() is not None:
                raise other.ended()
        raise DeadlineError.waiting_for(f"the next group to be trained ({self.role})", NO_PROGRESS_S, self._tail())

    def ends(self) -> None:
        try:
            if self.process.wait(END_S) == 0:
                return
        except subprocess.TimeoutExpired:
            raise DeadlineError.waiting_for(f"the {self.role} to end", END_S, self._tail()) from None
        raise self.ended()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_S)
        self._thread.join(END_S)  # at the end of the pipe
        if self.process.stdout is not None:
            self.process.stdout.close()

    def ended(self) -> TemporaryError:
        return TemporaryError(f"the {self.role} ended with {self.process.wait(END_S)}: {self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text("utf-8", "replace")[-2_000:].strip()


@contextlib.contextmanager
def _actor(role: str, file: Path, folder: Path) -> Iterator[_Actor]:
    log = folder / f"{role}.log"
    with log.open("w") as stderr:
        words = [sys.executable, "-I", "-m", soak_actors.__name__, role, str(file)]
        process = subprocess.Popen(bound_to_parent(words), stdout=subprocess.PIPE, stderr=stderr, text=True)
        with contextlib.closing(_Actor(role, process, log)) as actor:
            yield actor


def _write_config(
    folder: Path, servers: Mapping[str, EmbeddedValkey], *, steps: int, group_size: int, tokens: int
) -> Path:
    """With passwords, so readable by us alone."""
    url = {name: json.dumps(server.url) for name, server in servers.items()}
    file = folder / "config.toml"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as out:
        out.write(
            f'[run]\nname = "soak"\ndir = {json.dumps(str(folder))}\n[hub]\nurl = {url["hub"]}\n'
            f"[regions.{soak_actors.REGION}]\nurl = {url['region']}\n"
            f"[sampling]\ngroup_size = {group_size}\nmax_tokens = {tokens}\n"
            f"[learner]\nsteps = {steps}\ngroups_per_step = {GROUPS_PER_STEP}\ncheckpoint_every = {CHECKPOINT_EVERY}\n"
            f"[producer]\npoll_ms = 5\ngroups_in_flight = {2 * GROUPS_PER_STEP}\n[ledger]\ncheck_every_s = 1.0\n"
        )
    load_config(file.read_text("utf-8"))  # a mistake is found here, not in a child
    return file


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0  # it has just ended


def as_json(done: Soak) -> dict[str, Any]:
    memory = [{**asdict(found), "flat": found.flat} for found in done.memory]
    return {**asdict(done), "memory": memory, "kept": done.kept}


def table(done: Soak) -> Table:
    shown = Table(
        box=box.SIMPLE_HEAD, title_justify="left",
        title=f"{done.groups:,} groups of {done.entry_bytes:,} bytes in {done.seconds:,.0f} s; ledger: {_ledger(done.ledger)}",
    )  # fmt: skip
    for name in ("process", "resident MB", "bytes per 1,000 groups", "growth MB", "spread MB", "flat"):
        shown.add_column(name, justify="left" if name == "process" else "right")
    for found in done.memory:
        shown.add_row(
            found.process, f"{found.resident_bytes / 1e6:.1f}", f"{found.bytes_per_1000_groups:,.0f}",
            f"{found.growth_bytes / 1e6:.2f}", f"{found.spread_bytes / 1e6:.2f}", "yes" if found.flat else "no",
        )  # fmt: skip
    return shown


def _ledger(told: Mapping[str, Any]) -> str:
    fates = ", ".join(f"{name} {count:,}" for name, count in told["fates"].items())
    even = "exact" if told["balanced"] and not told["alarms"] else "does not hold"
    return f"produced {told['produced']:,} = {fates}, pending {told['pending']}: {even}"


def plot(done: Soak, path: Path) -> None:
    """Resident memory of each process over the groups trained."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    groups = [sample.groups for sample in done.samples]
    for name, colour in zip(PROCESSES, ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), strict=True):
        axes.plot(groups, [sample.resident_bytes[name] / 1e6 for sample in done.samples], color=colour, label=name)
    axes.axvspan(0, groups[len(groups) // 3], color="#767676", alpha=0.12, label="not judged")
    axes.set_xlabel("groups trained")
    axes.set_ylabel("resident memory, MB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
