"""The pipeline's own commands as child processes over embedded servers, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anabranch.schemas.config import RunConfig, load_config
from anabranch.transport.embedded_valkey import EmbeddedValkey

COMMAND = [sys.executable, "-I", "-m", "anabranch.cli.main"]
QUIET_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


class Pipeline:
    """One run: `start` commands, look at their logs, wait for them."""

    def __init__(self, root: Path, servers: dict[str, EmbeddedValkey], config_text: str) -> None:
        self.root, self.servers = root, servers
        self.config_file = root / "run.toml"
        self.config_file.write_text(config_text)
        self.environment = {"ANABRANCH__HUB__URL": servers["hub"].url}
        for name, server in servers.items():
            if name != "hub":
                self.environment[f"ANABRANCH__REGIONS__{name.upper()}__URL"] = server.url
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def config(self) -> RunConfig:
        return load_config(self.config_file.read_text(), environ=self.environment)

    def start(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        """Start `anabranch *argv --config ...`; its output goes to `name`.log."""
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*COMMAND, *argv, "--config", str(self.config_file)],
                env=os.environ | QUIET_THREADS | self.environment,
                stdout=log,
                stderr=log,
            )
        self._processes[name] = process
        return process

    def wait_for_all(self, *, deadline_s: float) -> None:
        """Until every process has ended with 0. Fails at once, with its log, when one ends otherwise."""
        end = time.monotonic() + deadline_s
        while running := [n for n, p in self._processes.items() if p.poll() is None]:
            self._fail_if_any_failed()
            assert time.monotonic() < end, f"{running} still run after {deadline_s} s\n{self.log(running[0])[-3000:]}"
            time.sleep(0.2)
        self._fail_if_any_failed()

    def _fail_if_any_failed(self) -> None:
        for name, process in self._processes.items():
            assert not process.poll(), f"{name} ended with {process.poll()}\n{self.log(name)[-3000:]}"

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + 15
        for process in self._processes.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def pipeline(root: Path, regions: list[str], config_text: str) -> Iterator[Pipeline]:
    """A `Pipeline` over a hub and one server per region; everything is stopped at the end."""
    servers: dict[str, EmbeddedValkey] = {}
    try:
        for name in ["hub", *regions]:
            servers[name] = EmbeddedValkey(root / f"redis {name}")
            servers[name].start()
        running = Pipeline(root, servers, config_text)
        try:
            yield running
        finally:
            running.stop()
    finally:
        for server in servers.values():
            server.stop()
