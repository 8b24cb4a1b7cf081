"""`anabranch chaos run`: sites, processes, faults, and the verdict.

Invariant: exit code 0 only if every check of the verdict holds; however the run ends (Ctrl-C, kill −9 too), no process, network
namespace, mount or temporary folder of it is left. Held by tests/process/test_chaos.py.

    model -> servers -> clients -> warm-up -> faults -> calm -> learner, producers, recorder stopped in turn -> evidence
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from anabranch.deploy import topology
from anabranch.deploy.chaos import ending
from anabranch.deploy.chaos.exits import Exits
from anabranch.deploy.chaos.lab import Lab
from anabranch.deploy.chaos.links import Link
from anabranch.deploy.chaos.monitor import Monitor
from anabranch.deploy.chaos.place import LIMITS, RUN, Place, server_name
from anabranch.deploy.chaos.scenario import Scenario
from anabranch.deploy.chaos.sites import HUB, REGION_NAMES, Sites
from anabranch.deploy.child import Child, ChildSpec, Restart
from anabranch.deploy.run_directory import claim
from anabranch.deploy.slow_link import why_not
from anabranch.deploy.supervisor import Outcome, State, Supervisor
from anabranch.schemas.errors import EXIT_OK, ConfigError, DeadlineError, UsageError
from anabranch.transport.metrics_log import METRICS_FILE

MODEL_DEADLINE_S = 1800.0
SERVERS_DEADLINE_S = 60.0
START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 60.0
WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """`program` makes the links (deploy/slow_link.py says how)."""

    program: Path
    directory: Path
    seed: int = 1
    sites: int = 3
    report: Path | None = None


def run(options: ChaosOptions, scenario: Scenario) -> int:
    """Raises ConfigError: this machine lacks something; TemporaryError: the directory is in use."""
    if not 2 <= options.sites <= 1 + len(REGION_NAMES):
        raise UsageError(f"--sites {options.sites}: the hub and one to {len(REGION_NAMES)} regions")
    if lacking := why_not(options.program):
        raise ConfigError(f"no chaos run here: {lacking}")
    directory = options.directory.absolute()
    if (directory / "config.toml").exists():
        raise UsageError(f"{directory} holds a chaos run already: choose another --dir, or remove it")
    with claim(directory) as lock:
        return _Chaos(options, directory, scenario, lock).run()


class _Chaos:
    def __init__(self, options: ChaosOptions, directory: Path, scenario: Scenario, lock: int) -> None:
        self._options, self._directory, self._scenario = options, directory, scenario
        self._exits = Exits()
        self._links: dict[str, Link] = {}
        self._lab: Lab | None = None
        self._collected: ending.Ending | None = None
        self._supervisor = Supervisor(
            directory / "logs", environment={}, limits=LIMITS, stop_deadline_s=STOP_DEADLINE_S,
            between=self._collect, tick=self._tick, hold_fds=(lock,),
        )  # fmt: skip

    def run(self) -> int:
        began = time.monotonic()
        model = self._make_model()
        with ExitStack() as stack:
            sites = stack.enter_context(Sites(REGION_NAMES[: self._options.sites - 1]))
            stack.callback(self._close)
            supervisor = stack.enter_context(self._supervisor)
            temporary = supervisor.folder("anabranch-")
            cache = topology.cache_directory(os.environ)
            supervisor.environment = topology.common_environment(os.environ, temporary=temporary, cache=cache)
            self._place = Place(
                self._directory, sites, temporary=temporary, model=model, seed=self._options.seed,
                overrides=self._scenario.overrides,
            )  # fmt: skip
            outcome = self._phases()
            if self._collected is None:
                self._collect()
        assert self._collected is not None
        ended = outcome.line if outcome is not None else ""
        return ending.conclude(
            self._collected, self._scenario, self._options.report, self._directory,
            ended=ended, wall_s=time.monotonic() - began,
        )  # fmt: skip

    def _phases(self) -> Outcome | None:
        place, supervisor, sites = self._place, self._supervisor, self._place.sites
        place.make()
        for region in sites.regions:
            self._links[region] = Link(self._options.program, sites, region, self._directory / f"link-{region}.log")
            self._links[region].make()
        for link in self._links.values():
            link.wait_up()
        children = {server_name(site): self._add(place.server_spec(site)) for site in sites.names}
        urls = {site: place.url(site) for site in sites.names}
        monitor = Monitor(RUN, urls, HUB, place.run_directory / METRICS_FILE)
        lab = self._lab = Lab(place, self._links, children, monitor)
        outcome = supervisor.run_until(
            lambda: all(lab.answers(site) for site in sites.names),
            what="the servers to answer", deadline_s=SERVERS_DEADLINE_S,
        )  # fmt: skip
        if outcome is not None:
            return outcome
        monitor.start()
        for name in place.clients:
            children[name] = self._add(place.client_spec(name))
        self._say("starting")
        outcome = supervisor.run_until(self._warm, what="the first steps", deadline_s=START_DEADLINE_S)
        if outcome is not None:
            return outcome
        scenario = self._scenario
        scenario.begin(lab)
        outcome = supervisor.run_until(self._scenario_over, what="the scenario", deadline_s=scenario.deadline_s)
        return outcome or self._stop_clients(lab)

    def _warm(self) -> bool:
        lab = self._lab
        assert lab is not None
        return lab.monitor.last_step >= WARM_STEPS and all(lab.alive(name) for name in lab.children)

    def _scenario_over(self) -> bool:
        assert self._lab is not None
        if self._lab.monitor.failure is not None:
            raise self._lab.monitor.failure
        return self._scenario.turn(self._lab)

    def _stop_clients(self, lab: Lab) -> Outcome | None:
        """The learner first, which settles what its last checkpoint holds; then who fills streams, then who reads them."""
        producers = [lab.children[f"producer-{region}"] for region in lab.regions]
        for batch in ([lab.children["learner"]], producers, [lab.children["recorder"]]):
            for child in batch:
                child.terminate()
            names = ", ".join(child.spec.name for child in batch)
            self._say(f"stopping {names}")
            try:
                outcome = self._supervisor.run_until(
                    lambda batch=batch: all(child.over for child in batch),  # type: ignore[misc]
                    what=f"{names} to stop", deadline_s=STOP_DEADLINE_S,
                )  # fmt: skip
            except DeadlineError as error:
                return _failed(str(error))
            if outcome is not None:
                return outcome
        return None

    def _make_model(self) -> Path:
        """In the cache, made by its own command when it is not there."""
        target = topology.cache_directory(os.environ) / "models" / "tiny"
        out = self._directory / "logs" / "model.out"
        with Supervisor(self._directory / "logs", environment=dict(os.environ)) as supervisor:
            argv = topology.program("model", "tiny", "--out", str(target))
            child = supervisor.add(ChildSpec("model", argv, restart=Restart.NEVER, stdout=out))
            outcome = supervisor.run_to_end(child, deadline_s=MODEL_DEADLINE_S)
            if outcome is not None:
                raise ConfigError(f"the model was not made: {outcome.line}; see {child.log}")
        return Path(out.read_text(encoding="utf-8").strip().splitlines()[-1])

    def _add(self, spec: ChildSpec) -> Child:
        """Started on its site, so that its sd_notify socket is there too."""
        with self._place.sites.inside(self._place.site_of(spec.name)):
            return self._supervisor.add(spec)

    def _tick(self) -> None:
        self._exits.look(self._supervisor.children)
        for link in self._links.values():
            link.tend()
        if self._lab is not None:
            self._lab.log_sizes.look(time.monotonic())
            self._lab.mend_servers()
            if self._supervisor.state is State.STOPPING:
                self._scenario.abandon(self._lab)
            else:
                self._say("")

    def _say(self, phase: str) -> None:
        self._scenario.say(self._lab, phase, sys.stderr)

    def _collect(self) -> None:
        """Clients are gone, servers are not."""
        if self._lab is None or self._collected is not None:
            return
        self._exits.look(self._supervisor.children)
        self._scenario.abandon(self._lab)
        self._collected = ending.collect(self._lab, self._exits, self._scenario)

    def _close(self) -> None:
        """After the supervisor."""
        if self._lab is not None:
            self._lab.monitor.close()
            self._lab.close()
        for link in self._links.values():
            link.close()


def _failed(line: str) -> Outcome:
    from anabranch.deploy.supervisor import End

    return Outcome(End.FAILED, line, 1)


__all__ = ["EXIT_OK", "ChaosOptions", "run"]
