"""kill -9 of producers inside the swap of a real engine: whoever survives or starts again computes with the head's bits.

`ANABRANCH_SWAP_KILLS` sets how many kills (24 by default), `ANABRANCH_KILL_SEED` which. Most producers carry their death
with them: at a call that one of their threads makes (the n-th in code that prepares, writes, swaps, fetches, ...), or some
milliseconds after a thread has entered a phase; the others are killed at any time. One lives through it all.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.producers.mirror import layout_of_checkpoint
from anabranch.producers.mirror_memory import MirrorState
from anabranch.producers.node_mirror import open_node_mirror
from anabranch.transport.embedded_valkey import EmbeddedValkey
from tests.process.swap_actors import MODEL_VARIABLE, RUN, Phase
from tests.process.swap_node import ACTORS, Node, holders_of, processes_of_this_group
from tests.tiny import build_checkpoint
from tests.zygote import Zygote, is_alive, kill

pytestmark = [pytest.mark.process, pytest.mark.engine]

KILLS = int(os.environ.get("ANABRANCH_SWAP_KILLS", "24"))
VICTIMS = 2  # at a time, beside the one that lives
# Calls that a producer makes of that sort in its first second or so, as powers of ten
FUSES = {
    "prepare": 3.2, "write": 2.5, "swap": 3.0, "finish": 2.3,
    "fetch": 2.5, "decode": 3.0, "advance": 2.8, "scatter": 2.5, "rebuild": 2.0, "join": 1.5,
}  # fmt: skip
IN_SWAP = (Phase.PREPARING, Phase.SWAPPING, Phase.WRITING, Phase.FINISHING)
WATCHED = (*IN_SWAP, Phase.VERIFYING, Phase.FETCHING, Phase.APPLYING)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def zygote(model_dir: Path) -> Iterator[Zygote]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODEL_VARIABLE, str(model_dir))
        made = Zygote(f"{ACTORS}:warm_up")
    yield made
    made.close()


def fates(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Ways to die, most of them inside a swap; every one comes in each round, and one inside its writes comes first."""

    def fuse(where: str) -> dict[str, Any]:
        return {"fuse": {"die": int(10 ** rng.uniform(0, FUSES[where])), "where": where}}

    def phase(phase: Phase) -> dict[str, Any]:
        return {"phase": phase, "nth": int(10 ** rng.uniform(0, 1)), "delay_s": 10 ** rng.uniform(-4.5, -1.7)}

    def any_time() -> dict[str, Any]:
        return {"due_s": time.monotonic() + rng.uniform(0, 1.0)}

    ways: list[Callable[[], dict[str, Any]]] = [any_time]
    ways += [functools.partial(fuse, where) for where in (*FUSES, "prepare", "write", "swap")]
    ways += [functools.partial(phase, p) for p in WATCHED]
    yield fuse("write")
    while True:
        for way in rng.sample(ways, len(ways)):
            yield way()


def kill_some(node: Node, ways: Iterator[dict[str, Any]], *survivors: int) -> list[tuple[Phase, Phase]]:
    """Kill `KILLS` producers, and start others in their place; where each of them was, as `Node.phases`."""
    killed: list[tuple[Phase, Phase]] = []
    victims = [node.producer(**next(ways)) for _ in range(VICTIMS)]
    while len(killed) < KILLS:
        time.sleep(0.0003)
        node.assert_alive(*survivors)
        for i, victim in enumerate(victims):
            by_itself = not is_alive(victim.pid)
            if not by_itself and not node.is_due(victim):
                continue
            if by_itself:
                assert node.events("dies", victim.pid), f"a producer ended by itself:\n{node.output_text()}"
            else:
                kill(victim.pid)
            killed.append(node.phases(victim))
            victims[i] = node.producer(**next(ways))
    for victim in victims:
        kill(victim.pid)
    return killed


def report(node: Node, killed: list[tuple[Phase, Phase]]) -> None:
    engine, follower = (Counter(phase.name.lower() for phase in phases) for phases in zip(*killed, strict=True))
    fuses = Counter(said["where"] for said in node.events("dies"))
    published, served = len(node.published()), len(node.events("served"))
    print(
        f"{len(killed)} kills; engine's thread: {dict(engine)}; follower's: {dict(follower)}; by a fuse: {dict(fuses)}"
    )
    print(f"{published} versions published, {served} swaps checked, {len(node.events('valid'))} states of the mirror")


@pytest.mark.timeout(120 + 4 * KILLS)
def test_killed_inside_a_swap_survivors_and_restarts_serve_the_head(
    tmp_path: Path, zygote: Zygote, model_dir: Path
) -> None:
    rng = random.Random(int(os.environ.get("ANABRANCH_KILL_SEED", "0")) or None)
    layout = layout_of_checkpoint(model_dir)
    with EmbeddedValkey(tmp_path / "hub", fsync="everysec") as server:
        processes = processes_of_this_group()
        node = Node(server.url, tmp_path, zygote, rng)
        try:
            publisher = node.publisher()
            survivor = node.producer().pid
            node.wait_until_served(None, survivor)
            probe = open_node_mirror(layout, run=RUN, node_dir=node.node_dir)  # to look at
            memory = os.stat(probe.path)
            killed = kill_some(node, fates(rng), publisher, survivor)

            restarted = [node.producer().pid for _ in range(VICTIMS)]
            node.wait_until_served(None, *restarted)
            node.assert_alive(publisher)
            kill(publisher)
            head = node.channel.head()
            assert head is not None
            node.wait_until_served(str(head), survivor, *restarted)
            node.assert_nothing_wrong_was_said()
            node.assert_alive(survivor, *restarted)
            published = node.published()
            index = {str(entry.policy): entry.digest for entry in node.channel.index()}
            assert index.items() <= published.items()
            content = probe.content()
            assert content is not None
            assert content.policy == head
            assert content.digest == probe.digest() == published[str(head)], "recomputed in full from the image"
            assert any(engine in IN_SWAP for engine, _ in killed)
            probe.close()
            report(node, killed)
        finally:
            node.close()
        assert holders_of(memory) == []
        assert processes_of_this_group() <= processes
    fresh = open_node_mirror(layout, run=RUN, node_dir=node.node_dir)
    assert (fresh.state, fresh.alone) == (MirrorState.EMPTY, ""), "the memory went with the last of them"
    fresh.close()
