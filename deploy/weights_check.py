"""`anabranch weights verify`, from names of versions to lines on the terminal and an error that says what is broken first.

Invariant: if anything is broken all of it is printed, and the command fails with the first. Held by
tests/unit/deploy/test_weights_check.py.
"""

from __future__ import annotations

from anabranch.deploy.delta_progress import progress
from anabranch.deploy.weights_keys import signature_check
from anabranch.deploy.weights_live import ask_producers, render
from anabranch.deploy.weights_verify import Findings, verify
from anabranch.deploy.weights_versions import parse_version, published_head, spans
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import DeadlineError, DeltaError, UsageError
from anabranch.transport.boards import RunBoard
from anabranch.transport.weight_channel import WeightChannel


def check_channel(
    channel: WeightChannel,
    config: RunConfig,
    *,
    first: str | None = None,
    last: str | None = None,
    chunks_only: bool = False,
    threads: int | None = None,
) -> None:
    """Check the channel, from version `first` to version `last` (default: all), and print what was found.

    Raises:
        DeltaError: something is broken; names the first.
        UsageError: no version is in that range.
        TemporaryError: nothing is published yet.
    """
    head = published_head(channel, config.run.name)
    entries = channel.index()
    low = parse_version(first, head) if first else entries[0].policy
    high = parse_version(last, head) if last else head
    wanted = [entry for entry in entries if low <= entry.policy <= high]
    if not wanted:
        raise UsageError(
            f"nothing from {low} to {high} is on the channel, which holds {spans(e.policy for e in entries)}"
        )
    with progress("verifying", sum(entry.payload_bytes for entry in wanted)) as advance:
        found = verify(
            channel,
            wanted,
            check_signature=signature_check(config.channel.trusted_keys),
            chunks_only=chunks_only,
            threads=threads or config.channel.fetch_threads,
            advance=advance,
        )
    print(summary(found, spans(entry.policy for entry in wanted), signed=bool(config.channel.trusted_keys)))
    for note in found.notes:
        print(f"note: {note}")
    for broken in found.broken:
        print(f"BROKEN: {broken}")
    if found.broken:
        more = f" (the first of {len(found.broken)} findings)" if len(found.broken) > 1 else ""
        raise DeltaError(f"{found.broken[0]}{more}")


def summary(found: Findings, versions: str, *, signed: bool) -> str:
    decoded = f"{found.decoded} decoded, each with the digest it names" if found.decoded else "none decoded"
    return (
        f"{versions}: {found.manifests} manifests{', all signed by a trusted key' if signed else ''}; {found.chunks} chunks, "
        f"{found.payload_bytes:,} bytes, intact; {decoded}"
    )


def check_producers(channel: WeightChannel, runs: RunBoard, *, deadline_s: float) -> None:
    """Ask every producer, and print the answers.

    Raises:
        DeltaError: a producer serves other weights than it should, or cannot tell; names the first.
        DeadlineError: producers have not answered.
        TemporaryError: no producer reports.
    """
    answers, late = ask_producers(channel, runs, deadline_s=deadline_s)
    print(render(answers, late))
    wrong = [answer for answer in answers if answer.fault]
    if wrong:
        raise DeltaError(f"{wrong[0].producer}: {wrong[0].fault}" + (f" (1 of {len(wrong)})" if len(wrong) > 1 else ""))
    if late:
        raise DeadlineError.waiting_for(
            f"{', '.join(late)} to verify the live weights", deadline_s, "see its log, or give a longer --deadline"
        )
