"""The producer and the learner of `anabranch bench soak`, a process each.

Invariant: everything that delivery has is there and real (permits, spool, sender, streams, reader, feed, fate log, ledger,
checkpoints of the feed); engine and optimizer are not: groups are made up, a step does nothing.
Held by tests/process/test_bench_soak.py.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.reader import Reader
from anabranch.deploy.delivery_load import make_groups
from anabranch.learner.feed import Feed
from anabranch.learner.ledger_watch import LedgerWatch
from anabranch.producers.hub_link import HubLink
from anabranch.producers.outbox import Outbox
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.trajectory import Group, encode_group
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.files import write_atomically
from anabranch.transport.log import setup_logging
from anabranch.transport.permits import Permit
from anabranch.transport.runtime import die_with_parent
from anabranch.transport.wiring import connect_hub, connect_region, connect_regions

REGION = "east"
EPOCH = 1
TURN_S = 0.002
LEDGER_DEADLINE_S = 30.0


def produce(config: RunConfig) -> None:
    """One producer, until the run is finished."""
    stream, hub, boards = connect_region(config, REGION), connect_hub(config), connect_hub(config)
    outbox = Outbox(
        stream,
        SpoolSlots(config.spool_directory, REGION, config.spool),
        config.spool,
        region=REGION,
        max_entry_bytes=config.stream.max_entry_bytes,
        groups_in_flight=config.producer.groups_in_flight,
    )
    done = 0

    def status() -> ProducerStatus:
        now_ms = time.time_ns() // 1_000_000
        return ProducerStatus(
            updated_ms=now_ms, region=REGION, pid=os.getpid(), state="soaking", policy="", groups_done=done
        )

    link = HubLink(
        hub.permits,
        hub.runs,
        hub.evaluations,
        producer=outbox.producer,
        lease_ms=config.producer.permit_lease_ms,
        poll_ms=config.producer.poll_ms,
        status=status,
    )
    link.resume(spooled=outbox.spooled(), waiting=outbox.waiting())
    outbox.start()
    link.start()
    (group,) = make_groups(1, rollouts=config.sampling.group_size, tokens=config.sampling.max_tokens)
    group = replace(group, run=config.run.name, region=REGION, producer=outbox.producer)
    try:
        while link.finished is None:
            state = boards.permits.state()
            serving = None if state.epoch is None else PolicyVersion(state.epoch, state.version)
            room = config.producer.groups_in_flight if outbox.accepts else 0
            link.want(room, serving)
            for permit in link.take(room):
                assert serving is not None
                outbox.put(_sampled(group, permit, serving))
                link.hold(permit.group_index)
                done += 1
            for index in outbox.appended():
                link.release(index)
            outbox.check()
            time.sleep(TURN_S)
    finally:
        outbox.close()
        link.close()


def encode_one(config: RunConfig) -> bytes:
    """An entry's payload as the producer makes them."""
    return encode_group(make_groups(1, rollouts=config.sampling.group_size, tokens=config.sampling.max_tokens)[0])


def _sampled(group: Group, permit: Permit, policy: PolicyVersion) -> Group:
    spans = (VersionSpan(policy, 0),)
    rollouts = tuple(replace(rollout, spans=spans) for rollout in group.rollouts)
    return replace(group, group_index=permit.group_index, attempt=permit.attempt, rollouts=rollouts)


def learn(config: RunConfig) -> None:
    """The learner over all steps; prints how many groups are trained after every checkpoint, and at the end the ledger."""
    learner, directory = config.learner, config.run.directory
    hub, streams = connect_hub(config), connect_regions(config)
    fates = FateLog(directory / "fates", file_lines=config.ledger.fate_file_lines)
    reader = Reader(
        streams, run=config.run.name, group=LEARNER_GROUP, consumer="learner-0", config=config.stream,
        ledger_every_s=config.ledger.check_every_s,
    )  # fmt: skip
    feed = Feed(
        reader, hub.permits, fates, batch_groups=learner.groups_per_step, max_age=config.correction.max_age,
        block_ms=config.stream.block_ms, hub_deadline_s=config.channel.connect_deadline_s,
    )  # fmt: skip
    watch, alarms = LedgerWatch(reader, fates), 0
    forks, now = {EPOCH: 0}, PolicyVersion(EPOCH, 0)
    accepted = feed.drain_backlog(now, forks)
    hub.permits.reset(
        epoch=EPOCH, version=0, batch=learner.groups_per_step, max_age=config.correction.max_age,
        total=learner.steps * learner.groups_per_step, accepted=accepted,
    )  # fmt: skip
    dropped = 0
    for step in itertools.count(1):
        fed = feed.next_batch(now, forks, deadline_s=learner.batch_deadline_s)
        assert fed is not None
        dropped += sum(fed.dropped.values())
        feed.consumed(fed.arrivals)
        now = PolicyVersion(EPOCH, step)
        hub.permits.advance(step, epoch=EPOCH, abandoned=feed.trained.abandoned)
        alarms += sum(what == "ledger_alarm" for what, _ in watch.look())
        if step % learner.checkpoint_every == 0 or step == learner.steps:
            write_atomically(directory / "feed.json", json.dumps(feed.state()).encode())
            feed.checkpointed()
            _say({"trained": step * learner.groups_per_step, "dropped": dropped})
        if step == learner.steps:
            break
    feed.drop_surplus(now, forks)
    end, ledger = time.monotonic() + LEDGER_DEADLINE_S, streams[REGION].ledger(LEARNER_GROUP)
    while ledger.pending and time.monotonic() < end:
        time.sleep(0.1)
        ledger = streams[REGION].ledger(LEARNER_GROUP)
    hub.runs.finish("soaked")
    _say(
        {
            "produced": ledger.produced, "foreign": ledger.foreign, "pending": ledger.pending, "fates": ledger.fates,
            "balanced": ledger.balanced, "alarms": alarms,
        }
    )  # fmt: skip
    feed.close()


def _say(told: dict[str, object]) -> None:
    print(json.dumps(told), flush=True)


def main(role: str, file: str) -> None:
    die_with_parent()
    setup_logging(role)
    config = load_config(Path(file).read_text("utf-8"))
    {"producer": produce, "learner": learn}[role](config)


if __name__ == "__main__":
    main(*sys.argv[1:])
