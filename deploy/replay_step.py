"""`anabranch replay step`: recorded steps run again by the production engine, and compared bit for bit with what was logged.

Invariant: of the run nothing is written; a step counts as equal only if it was run, and loss, gradient norm, every value of every
rollout and the digest of the weights (where one was recorded) have the recorded bits. Held by tests/e2e/test_replay_step.py.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from anabranch.consumers.recorded_batch import recorded_batch
from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.step_comparison import Difference, compare, surroundings
from anabranch.consumers.step_records import StepPlace, read_facts, read_rollouts, recorded_steps
from anabranch.consumers.version_files import digests
from anabranch.learner.batch import build_batch
from anabranch.learner.launch import launch_ranks
from anabranch.learner.record_order import RecordOrder
from anabranch.learner.replay_plan import Segment, Start, checkpoints_in, merged, plan
from anabranch.learner.replay_rank import FoundSegment, FoundStep, ReplayedSegment, ReplayedStep, ReplayJob
from anabranch.schemas.config import RunConfig, dump_toml
from anabranch.schemas.errors import AnabranchError, ConfigError, StepRecordError, UsageError
from anabranch.schemas.step_record import StepFacts, step_folder
from anabranch.schemas.versions import PolicyVersion

_FOUND = TypeAdapter(list[FoundSegment])


@dataclass(frozen=True, slots=True)
class StepReplay:
    """One step, run again. `digest`, `digest_then`: of the weights after it; None: not recorded, or it did not get so far."""

    facts: StepFacts
    start: Start
    differences: list[Difference] = field(default_factory=list)
    surroundings: list[str] = field(default_factory=list)
    digest: str | None = None
    digest_then: str | None = None
    apart: list[tuple[str, int, int]] = field(default_factory=list)  # tensor, elements that differ, of how many

    @property
    def equal(self) -> bool:
        return not self.differences


@dataclass(frozen=True, slots=True)
class OpenRun:
    """What is needed of a run beside its records. `model`: folder with the model's configuration; `device`: instead of the recorded one."""

    directory: Path
    reader: RunReader
    model: Path
    device: str | None
    tell: Callable[[str], object]


def chosen(directory: Path, step: int | None, epoch: int | None, *, some: int | None, seed: int) -> list[StepPlace]:
    """The records that are asked for: one step (of the newest epoch that did it), or `some` drawn at random.

    Raises UsageError: there is no such record.
    """
    places = [p for p in recorded_steps(directory) if epoch is None or p.epoch == epoch]
    if some is not None:
        drawn = random.Random(seed).sample(places, min(some, len(places)))  # noqa: S311 - which steps, not a secret
        found = sorted(drawn)
    else:
        found = [p for p in places if p.step == step][-1:]
    if not found:
        there = f"steps {places[0].step} to {places[-1].step}" if places else "none"
        of = "" if epoch is None else f" of epoch {epoch}"
        raise UsageError(
            f"{directory} has no record of {'any step' if step is None else f'step {step}'}{of}; recorded: {there}"
        )
    return found


def replay_steps(run: OpenRun, wanted: Sequence[StepPlace], *, from_step: int | None = None) -> list[StepReplay]:
    """Every step on the way to the wanted ones, in order.

    Raises:
        CheckpointError: no checkpoint leads there.
        StepRecordError: a record on the way is missing or damaged, or its batch cannot be rebuilt.
        ConfigError: it cannot run here (device, model).
        AnabranchError: a rank failed; it has said why.
    """
    recorded, checkpoints = recorded_steps(run.directory), checkpoints_in(run.directory)
    segments = merged(
        plan(place, read_facts(place).forks, checkpoints, recorded, from_step=from_step) for place in wanted
    )
    by_ranks: dict[int, list[tuple[Segment, list[StepFacts]]]] = {}
    for segment in segments:
        facts = [read_facts(place) for place in segment.steps]
        _check_one_configuration(facts)
        by_ranks.setdefault(facts[0].world_size, []).append((segment, facts))
    found: list[StepReplay] = []
    for ranks, planned in by_ranks.items():
        with tempfile.TemporaryDirectory(prefix="anabranch-replay-") as folder:
            found += _replay(run, planned, checkpoints, ranks, Path(folder))
    return sorted(found, key=lambda one: (one.facts.epoch, one.facts.step))


def open_run(
    directory: Path,
    reader: RunReader,
    settings: dict[str, Any],
    *,
    model: Path | None,
    device: str | None,
    tell: Callable[[str], object],
) -> OpenRun:
    """`settings`: the run's configuration, for where its model is. Raises ConfigError: it is not there."""
    configured = Path(settings.get("model", {}).get("path") or "")
    candidates = [model] if model is not None else [configured, directory / "model"]
    for folder in candidates:
        if (folder / "config.json").is_file():
            return OpenRun(directory, reader, folder, device, tell)
    raise ConfigError(
        f"the model is not at {' or '.join(map(str, candidates))}: give --model FOLDER (its configuration is enough)"
    )


def _check_one_configuration(facts: Sequence[StepFacts]) -> None:
    first = facts[0]
    for one in facts[1:]:
        if one.config_digest != first.config_digest:
            changed = [
                f"{s}.{k}"
                for s, keys in one.settings.items()
                for k, v in keys.items()
                if first.settings.get(s, {}).get(k) != v
            ]
            raise StepRecordError(
                f"step {one.step} was done with other settings than step {first.step} ({', '.join(changed[:5])}), and no checkpoint lies "
                f"between: replay from one of step {one.step - 1}, if there is one"
            )


def _config_of(run: OpenRun, facts: StepFacts, folder: Path) -> str:
    """The learner that did the step, as TOML. Its records go below `folder`."""
    try:
        config = RunConfig.model_validate(
            {
                "run": {"name": facts.run, "dir": folder, **facts.settings["run"]},
                "model": {"path": run.model},
                "sampling": facts.settings["sampling"],
                "learner": facts.settings["learner"] | ({"device": run.device} if run.device else {}),
                "correction": facts.settings["correction"],
                "gates": facts.settings["gates"],
                "recorder": {"tokens": facts.tokens},
            }
        )
    except (ValidationError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the settings of step {facts.step} of epoch {facts.epoch} are none that this version runs: {error}"
        ) from error
    return dump_toml(config)


def _replay(
    run: OpenRun,
    planned: Sequence[tuple[Segment, list[StepFacts]]],
    checkpoints: Iterable[Start],
    ranks: int,
    folder: Path,
) -> list[StepReplay]:
    known = digests(run.directory)
    after = {(c.epoch, c.step): c.folder for c in checkpoints}
    job = ReplayJob(segments=[], found=folder / "found.json")
    for number, (segment, facts) in enumerate(planned):
        place = folder / f"segment-{number}"
        place.mkdir()
        steps = []
        for one in facts:
            run.tell(f"batch of step {one.step}")
            steps.append(
                _prepare(
                    run, one, place, known.get(PolicyVersion(one.epoch, one.step)), after.get((one.epoch, one.step))
                )
            )
        config = _config_of(run, facts[0], place)
        job.segments.append(ReplayedSegment(config=config, checkpoint=segment.start.folder, steps=steps))
    (folder / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-I", "-m", "anabranch.learner.replay_rank", str(folder / "job.json")]
    code = launch_ranks(ranks, command)
    if code:
        raise AnabranchError(f"running the steps again ended with {code}; what it said is above")
    segments = _FOUND.validate_json(job.found.read_bytes())
    found = []
    for number, ((segment, facts), seen) in enumerate(zip(planned, segments, strict=True)):
        found += _compared(run, segment, facts, seen, known, folder / f"segment-{number}")
    return found


def _prepare(run: OpenRun, facts: StepFacts, folder: Path, digest: str | None, checkpoint: Path | None) -> ReplayedStep:
    arrivals = recorded_batch(run.reader, facts)
    now = PolicyVersion(facts.epoch, facts.version_before)
    max_age = facts.settings["correction"]["max_age"]
    batch = build_batch([a.group for a in arrivals], now=now, forks=facts.forks, max_age=max_age)
    order = RecordOrder.of(arrivals, batch, now=now, forks=facts.forks)
    files = folder / f"{facts.step}.npz", folder / f"{facts.step}.order.json"
    files[0].write_bytes(batch.to_bytes())
    files[1].write_bytes(order.to_bytes())
    return ReplayedStep(step=facts.step, batch=files[0], order=files[1], checkpoint=checkpoint, digest=digest or "")


def _compared(
    run: OpenRun,
    segment: Segment,
    facts: Sequence[StepFacts],
    seen: FoundSegment,
    known: dict[PolicyVersion, str],
    folder: Path,
) -> list[StepReplay]:
    begin = known.get(PolicyVersion(segment.start.epoch, segment.start.step))
    found = []
    for place, then, outcome in zip(segment.steps, facts, seen.steps, strict=False):
        differences, here = [], None
        if begin is not None and begin != seen.begin and place == segment.steps[0]:
            differences.append(
                Difference("weights before the step", str(segment.start.folder or run.model), begin, seen.begin)
            )
        again = StepPlace(then.epoch, then.step, folder / then.run / step_folder(then.epoch, then.step))
        try:
            here = read_facts(again)
        except StepRecordError as error:
            differences.append(Difference("record", "the step", "there", f"none: {outcome.error or error}"))
        else:
            differences += compare((then, read_rollouts(place, then)), (here, read_rollouts(again, here)))
        digest_then = known.get(PolicyVersion(then.epoch, then.step))
        differences += _weights(then, outcome, digest_then)
        found.append(
            StepReplay(
                then, segment.start, differences, surroundings(then, here) if here else [], outcome.digest or None, digest_then,
                [(one.name, one.elements, one.of) for one in outcome.apart],
            )
        )  # fmt: skip
    return found


def _weights(facts: StepFacts, outcome: FoundStep, then: str | None) -> list[Difference]:
    refused = not facts.updates[-1].applied and any(update.applied is False for update in facts.updates)
    if outcome.error:
        return [] if refused else [Difference("the step", "a gate", "done", outcome.error)]
    return (
        [Difference("weights after the step", "root digest", then, outcome.digest)]
        if then and then != outcome.digest
        else []
    )
