"""`anabranch demo`: the whole loop on this machine, supervised.

Invariant: exit code 0 only if the learner finished the run; whatever happens, no process, port or temporary folder is
left (deploy/supervisor.py), the run directory can be resumed under the same settings, and the reason of an early end is
the last thing on the screen. Held by tests/process/test_demo.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from anabranch.consumers.ledger import read_ledger
from anabranch.deploy import run_directory, topology
from anabranch.deploy.child import ChildSpec, Restart
from anabranch.deploy.demo_options import DemoOptions, resolve, short_forms
from anabranch.deploy.glyphs import log_line
from anabranch.deploy.history import read_history
from anabranch.deploy.live import Monitor
from anabranch.deploy.summary import LEDGER_FILE, RUN_FILE, heldout_line, machine_facts, write_report
from anabranch.deploy.supervisor import End, Outcome, State, Supervisor
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import (
    EXIT_OK,
    AnabranchError,
    StreamUnavailableError,
    UsageError,
)
from anabranch.transport.boards import RunBoard
from anabranch.transport.files import write_atomically
from anabranch.transport.metrics_log import METRICS_FILE
from anabranch.transport.redact import redact_text
from anabranch.transport.redis_client import connect
from anabranch.transport.wiring import connect_hub

NEED_BYTES = {"tiny": 2 * 10**9, "smollm2": 8 * 10**9}
MODEL_DEADLINE_S = 3600.0
SERVERS_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0  # a learner writes a checkpoint when it is told to stop
_NO_MODEL = RunConfig().model.path


def demo(options: DemoOptions) -> int:
    """Run or resume a demo; returns the exit code.

    Raises:
        UsageError, ConfigError: wrong options or settings, or a run of that name with other ones.
        TemporaryError: the run directory is in use, or the disk is nearly full.
    """
    if options.producers < 1:
        raise UsageError(f"--producers {options.producers}: each region needs at least one")
    overrides = [*options.overrides, *short_forms(options)]
    config = resolve(options, overrides)
    directory = config.run.directory
    cache = topology.cache_directory(os.environ)
    for place in (directory, cache):
        run_directory.check_disk(place, NEED_BYTES[options.preset], f"the {options.preset} demo")
    with run_directory.claim(directory) as lock:
        resumed = run_directory.check_same_configuration(directory, config)
        if resumed and run_directory.is_complete(directory):
            print(f"{directory} is complete already", file=sys.stderr)
            return _say_result(directory, sys.stdout.isatty())
        return _Demo(options, overrides, config, cache, lock).run()


class _Demo:
    """One run of the demo, from the claimed directory to the exit code."""

    def __init__(self, options: DemoOptions, overrides: list[str], config: RunConfig, cache: Path, lock: int) -> None:
        self._options, self._overrides, self._config, self._cache = options, overrides, config, cache
        self._directory = config.run.directory
        self._began = time.monotonic()
        self._servers_up = False
        self._supervisor = Supervisor(
            self._directory / "logs",
            environment={},
            stop_deadline_s=STOP_DEADLINE_S,
            is_complete=self._learner_finished,
            between=self._before_servers_stop,
            tick=self._tick,
            hold_fds=(lock,),
        )
        self._monitor = Monitor(
            self._directory,
            connect_board=self._connect_board,
            children=lambda: self._supervisor.children,
            out=sys.stdout,
        )

    def run(self) -> int:
        with self._monitor, self._supervisor:
            temporary = self._supervisor.folder("anabranch-")
            self._supervisor.environment = topology.common_environment(
                os.environ, temporary=temporary, cache=self._cache
            )
            outcome = self._phases()
            self._monitor.finish()
        return self._conclude(outcome)

    def _phases(self) -> Outcome:
        supervisor, directory = self._supervisor, self._directory
        outcome = self._make_model()
        if outcome is not None:
            return outcome
        config_file = run_directory.write_config(directory, self._config)
        self._monitor.phase("starting the servers")
        specs, urls = topology.server_specs(self._config, directory / "redis")
        for spec in specs:
            supervisor.add(spec)
        outcome = supervisor.run_until(
            lambda: all(_answers(url) for url in urls.values()),
            what="the embedded Valkey servers to answer",
            deadline_s=SERVERS_DEADLINE_S,
        )
        if outcome is not None:
            return outcome
        self._config = resolve(self._options, [*self._overrides, *topology.url_overrides(urls)])
        self._servers_up = True
        # The hub may remember a run that finished and was interrupted before its end was noted here: producers that
        # look before the learner does would end.
        hub = connect_hub(self._config)
        hub.runs.start()
        hub.close()
        run_directory.write_config(directory, self._config)  # now with the addresses, passwords masked
        self._monitor.phase("starting learner and producers")
        for spec in topology.client_specs(self._config, config_file, producers=self._options.producers, urls=urls):
            supervisor.add(spec)
        return supervisor.run()

    def _make_model(self) -> Outcome | None:
        """Fill in `model.path` unless the user named a model; the command is quick when it is in the cache."""
        if self._config.model.path != _NO_MODEL:
            return None
        self._monitor.phase("making the model")
        out = self._directory / "logs" / "model.out"
        target = self._cache / "models" / self._options.preset
        # The warm start must know the task as it is: its problems keep clear of the held-out ones.
        task = [word for o in self._overrides if o.startswith("task.") for word in ("--set", o)]
        file = ["--config", str(self._options.config)] if self._options.config else []
        argv = topology.program("model", self._options.preset, "--out", str(target), *file, *task)
        child = self._supervisor.add(ChildSpec("model", argv, restart=Restart.NEVER, stdout=out))
        outcome = self._supervisor.run_to_end(child, deadline_s=MODEL_DEADLINE_S)
        if outcome is not None:
            return outcome
        lines = out.read_text(encoding="utf-8").strip().splitlines()
        self._overrides.append(f"model.path={json.dumps(lines[-1] if lines else str(target))}")
        self._config = resolve(self._options, self._overrides)
        self._supervisor.forget(child)
        return None

    def _tick(self) -> None:
        children = self._supervisor.children
        if self._supervisor.state is State.STOPPING:
            self._monitor.view.stopping = True
            self._monitor.phase("stopping (Ctrl-C again: at once)")
        elif children and children[0].spec.name == "model":
            tail = children[0].log_tail(1)
            if self._monitor.is_terminal and tail:
                self._monitor.phase(f"making the model: {log_line(tail[0])[:60]}")
        elif self._monitor.steps_seen:
            self._monitor.phase("training")
        self._monitor.tick()

    def _before_servers_stop(self) -> None:
        """The clients are gone, the servers are not: the ledger as it stands."""
        self._monitor.stop_asking_the_board()
        if not self._servers_up:
            return
        try:
            ledger = read_ledger(self._short_patience())
        except AnabranchError:
            return
        plain = {
            r: {"produced": c.produced, "foreign": c.foreign, "pending": c.pending, "fates": c.fates}
            for r, c in ledger.items()
        }
        write_atomically(self._directory / LEDGER_FILE, (json.dumps(plain, indent=2) + "\n").encode())

    def _connect_board(self) -> RunBoard:
        if not self._servers_up:  # the configuration does not name our hub yet
            raise StreamUnavailableError("the hub's server has not been started")
        return connect_hub(self._short_patience()).runs

    def _short_patience(self) -> RunConfig:
        """For looks in passing: one try, and no long wait for an answer."""
        config = self._config
        stream = config.stream.model_copy(update={"socket_timeout_ms": 1000, "block_ms": 100})
        channel = config.channel.model_copy(update={"connect_deadline_s": 0.2})
        return config.model_copy(update={"stream": stream, "channel": channel})

    def _conclude(self, outcome: Outcome) -> int:
        directory = self._directory
        completed = outcome.end is End.COMPLETED
        facts = {
            "preset": self._options.preset,
            "command": redact_text(shlex.join(["anabranch", *sys.argv[1:]])),
            "completed": completed,
            "ended": outcome.line,
            "wall_s": round(time.monotonic() - self._began, 1),
            "restarts": {child.spec.name: child.restarts for child in self._supervisor.children},
            "machine": machine_facts(),
        }
        write_atomically(directory / RUN_FILE, (json.dumps(facts, indent=2) + "\n").encode())
        if (directory / METRICS_FILE).exists():
            write_report(directory, plots=completed)
        if completed and not self._options.keep_redis:
            shutil.rmtree(directory / "redis", ignore_errors=True)
        for file in (directory / "redis").glob("*/valkey.conf"):
            file.unlink(missing_ok=True)  # passwords of servers that are no more
        if not completed:
            self._say_why(outcome)
            return outcome.exit_code
        return _say_result(directory, self._monitor.is_terminal)

    def _learner_finished(self) -> bool:
        """A learner that was only asked to stop exits 0 too."""
        self._monitor.finish()
        notes = self._monitor.view.history.notes
        return bool(notes) and notes[-1].what == "finished"

    def _say_why(self, outcome: Outcome) -> None:
        say = partial(print, file=sys.stderr)
        last = self._monitor.view.history.last
        progress = f" at step {last.step} of {last.steps_total}" if last else ""
        if outcome.log_tail:
            say(f"last lines of {outcome.log}:")
            for line in outcome.log_tail:
                say(f"  {log_line(line)}")
        say(f"anabranch demo: {outcome.line}{progress}")
        if outcome.end is not End.FAILED:
            say(f"go on with: anabranch demo --name {self._config.run.name} and the same settings")


def _answers(url: str) -> bool:
    try:
        connect(url, deadline_s=0.0, what="an embedded server").close()
    except AnabranchError:
        return False
    return True


def _say_result(directory: Path, terminal: bool) -> int:
    """The two held-out numbers and where everything is, last."""
    history = read_history(directory / METRICS_FILE)
    before, after = (r.model_dump() if r else None for r in (history.before, history.after))
    line = f"{heldout_line(before, after)}  {directory}"
    if terminal:
        print(line)
        return EXIT_OK
    result = {
        "event": "result",
        "heldout_before": before and before["mean_reward"],
        "heldout_after": after and after["mean_reward"],
        "run_dir": str(directory),
    }
    print(json.dumps(result), flush=True)
    print(line, file=sys.stderr)
    return EXIT_OK
