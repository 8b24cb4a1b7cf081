"""`anabranch produce`: wires one producer together and runs it.

Invariant: the process ends with an exit code a supervisor understands; whatever ends it, its threads are stopped,
its shared memory is gone (it has no name in any file system) and its spool is free for the next process. A producer is
ready (READY=1) when it serves a verified version.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from anabranch.producers.engine import RolloutEngine
from anabranch.producers.environments import Problem, Task
from anabranch.producers.hub_link import HubLink
from anabranch.producers.lease_keeper import LeaseKeeper
from anabranch.producers.node_mirror import open_node_mirror
from anabranch.producers.outbox import Outbox
from anabranch.producers.rollout import RolloutLoop
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.producers.weight_follower import WeightFollower
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import ConfigError, UsageError
from anabranch.transport.log import setup_logging
from anabranch.transport.runtime import StopSignal, run_service, sd_notify
from anabranch.transport.signing import Verifier
from anabranch.transport.wiring import connect_hub, connect_region, connect_weights

PROMPT_TRIES = 64


class TaskPrompts:
    """A `Task` with its prompts as token ids. A training prompt longer than `task.max_prompt_tokens` is replaced by the
    next one of its own deterministic series, so that an over-long prompt can never wedge a step."""

    def __init__(self, task: Task, tokenizer: Any, config: RunConfig) -> None:
        self._task, self._tokenizer, self._config = task, tokenizer, config
        self._heldout = [(p, self._encode(p)) for p in map(task.heldout, range(config.task.heldout_size))]
        longest = max(len(ids) for _, ids in self._heldout)
        if longest > config.task.max_prompt_tokens:
            raise ConfigError(
                f"task.max_prompt_tokens = {config.task.max_prompt_tokens}, but a held-out prompt of {config.task.dataset} "
                f"has {longest} tokens"
            )
        self.training(0)

    def training(self, group_index: int) -> tuple[Problem, Sequence[int]]:
        for attempt in range(PROMPT_TRIES):
            problem = self._task.prompt(group_index, attempt)
            ids = self._encode(problem)
            if len(ids) <= self._config.task.max_prompt_tokens:
                return problem, ids
        raise ConfigError(
            f"task.max_prompt_tokens = {self._config.task.max_prompt_tokens}: {PROMPT_TRIES} prompts of "
            f"{self._config.task.dataset} in a row are longer (the last has {len(ids)} tokens)"
        )

    def heldout(self, index: int) -> tuple[Problem, Sequence[int]]:
        return self._heldout[index]

    def score(self, problem: Problem, text: str) -> float:
        return self._task.score(problem, text)

    def _encode(self, problem: Problem) -> list[int]:
        task = self._config.task
        if not task.chat_template:
            return list(self._tokenizer.encode(problem.prompt_text, add_special_tokens=False))
        messages = [{"role": "system", "content": task.system}] if task.system else []
        messages.append({"role": "user", "content": problem.prompt_text})
        encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer in `model_dir`, from disk only. Raises ConfigError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {model_dir} has no usable tokenizer: {error}") from error


def produce(config: RunConfig, region: str) -> int:
    """Run one producer of `region` until the run is finished or a signal comes; returns the exit code."""
    if region not in config.regions:
        raise UsageError(f"--region {region}: the configuration has {', '.join(sorted(config.regions))}")
    setup_logging("producer", region=region)
    log = structlog.get_logger()
    stop = StopSignal().install()

    def main() -> int:
        stream = connect_region(config, region)
        hub, weights, leases_hub = connect_hub(config), connect_weights(config, region), connect_hub(config)
        outbox = Outbox(
            stream,
            SpoolSlots(config.spool_directory, region, config.spool),
            config.spool,
            region=region,
            max_entry_bytes=config.stream.max_entry_bytes,
            groups_in_flight=config.producer.groups_in_flight,
        )
        producer = outbox.producer
        spooled, waiting = outbox.spooled(), outbox.waiting()
        outbox.start()
        log.info("producer begins", producer=producer, groups_spooled=len(spooled), groups_to_append=len(waiting))
        prompts = TaskPrompts(Task(config.task, config.run.seed), load_tokenizer(config.model.path), config)
        started = time.monotonic()
        engine = RolloutEngine(config.model.path, config.producer, config.sampling, seed=config.run.seed)
        log.info("engine loaded", seconds=round(time.monotonic() - started, 1), producer=producer)
        # After the engine, whose workers may be forks: they must not hold descriptors of the node's mirror.
        mirror = open_node_mirror(
            engine.layout,
            run=config.run.name,
            node_dir=config.producer.node_dir,
            codec_threads=config.channel.codec_threads,
        )
        leases = LeaseKeeper(leases_hub.channel, producer, lease_ms=config.channel.lease_ms)
        follower = WeightFollower(
            weights,
            mirror,
            run=config.run.name,
            poll_ms=config.producer.poll_ms,
            fetch_threads=config.channel.fetch_threads,
            verify=Verifier(config.channel.trusted_keys).check,
            leases=leases,
        )
        link = HubLink(
            hub.permits,
            hub.runs,
            hub.evaluations,
            producer=producer,
            lease_ms=config.producer.permit_lease_ms,
            poll_ms=config.producer.poll_ms,
            status=lambda: loop.status(),
            max_attempts=config.producer.max_attempts,
            hold_s=config.producer.group_deadline_s,
        )
        # What an earlier process of this name was sampling is handed out again at once; what it finished is in the spool.
        link.resume(spooled=spooled, waiting=waiting)
        loop = RolloutLoop(engine, prompts, follower, link, outbox, config, producer=producer, region=region)
        leases.start()
        follower.start()
        link.start()
        try:
            reason = loop.run(stop.is_set, heartbeat=_Heartbeat(engine))
        finally:
            outbox.close()
            link.close()
            follower.close()
            leases.close()
            engine.close()
            mirror.close()
            for connection in (stream, hub, weights, leases_hub):
                connection.close()
        log.info("producer ends", reason=reason)
        return 0

    return run_service(main)


class _Heartbeat:
    """Tells systemd that the loop turns, and, once, that the producer serves a version."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._ready, self._last_s = engine, False, 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if not self._ready and self._engine.policy is not None:
            self._ready = True
            sd_notify("READY=1", f"STATUS=serving {self._engine.policy}")
        if now - self._last_s > 1.0:
            self._last_s = now
            sd_notify("WATCHDOG=1")
