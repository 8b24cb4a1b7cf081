"""The screen of a running demo as a pure function of what is known: `render(view)`.

Invariant: `render` reads nothing but its argument and always gives the same number of lines for the same number of
producers, at most 30 at 100 columns, so that a live display neither jumps nor scrolls. Meaning is never in the colour
alone: every alarm has a sign and a word, and blue and orange stay apart for colour-blind readers.
Held by tests/unit/deploy/test_display.py.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from rich.console import Group, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.deploy.glyphs import bar, duration, size, sparkline
from anabranch.deploy.history import History
from anabranch.schemas.metrics import LearnerStatus, ProducerStatus, StepRecord

STALE_S = 20.0  # a status older than this is an alarm: processes refresh theirs every few seconds
FIRST_STEP_S = 180.0  # nobody knows yet how long a step takes
_AGE_ROWS = 4
_PRODUCER_ROWS = 10
_GOOD, _WARN, _DIM, _HEAD = "bright_blue", "bold orange1", "dim", "bold"


@dataclass(frozen=True, slots=True)
class ChildLine:
    """A supervised process, as the supervisor sees it."""

    name: str
    state: str
    restarts: int = 0
    last_exit: str = ""


@dataclass
class RunView:
    """Everything the screen shows. `phase` says what is going on outside of training (making the model, stopping)."""

    title: str
    history: History = field(default_factory=History)
    learner: LearnerStatus | None = None
    producers: dict[str, ProducerStatus] = field(default_factory=dict)
    children: list[ChildLine] = field(default_factory=list)
    phase: str = ""
    stopping: bool = False
    elapsed_s: float = 0.0
    now_ms: int = 0
    ascii_only: bool = False


def render(view: RunView, *, width: int = 100) -> RenderableType:
    """The screen, at most `width` columns."""
    width = max(40, min(width, 140))
    step = view.history.last
    return Group(
        _title(view, width),
        _progress(view, step, width),
        _learner(view),
        _timing(view, step),
        _rewards(view, width),
        Text(""),
        _regions(view, step, width),
        Text(""),
        _ages(view, step, width),
        _weights(view, step),
        _health(view, step),
        _processes(view, width),
        *_alarm_lines(view, step),
    )


def _learner_may_be_silent_s(view: RunView) -> float:
    """The learner reports between its acts: how long is a step, so long may it be silent in one, and again as long."""
    last = view.history.last
    if view.learner is None or view.learner.state != "stepping":
        return STALE_S
    return max(STALE_S, 2 * last.step_s) if last else FIRST_STEP_S


def alarms(view: RunView) -> list[str]:
    """What a person should look at, most urgent first; pure, used by the JSON mode too. Two texts that differ in their
    numbers only are the same alarm."""
    found = [f"{c.name} is {c.state}: {c.last_exit}" for c in view.children if c.state in ("backoff", "failed")]
    if view.stopping:  # silence is what was asked for
        return found
    if view.learner:
        found += view.learner.alarms
        found += [
            f"region {name}: {how}" for name, how in view.learner.regions.items() if how.startswith("unreachable")
        ]
        found += view.learner.notes
    if view.learner and view.now_ms - view.learner.updated_ms > _learner_may_be_silent_s(view) * 1000:
        found.append(f"learner silent for {(view.now_ms - view.learner.updated_ms) / 1000:.0f} s")
    for name, status in view.producers.items():
        if view.now_ms - status.updated_ms > STALE_S * 1000:
            found.append(f"{name} silent for {(view.now_ms - status.updated_ms) / 1000:.0f} s")
        elif status.last_error:
            found.append(f"{name}: {status.last_error}")
    if (step := view.history.last) is not None:
        skipped = f"; {step.skipped_groups} groups kept from the weights" if step.skipped_groups else ""
        found += [f"gate: {gate}{skipped}" for gate in step.gates]
        found += [
            f"dropped {count} group(s): {cause}"
            for cause, count in step.dropped.items()
            if count and cause != "zero_variance"
        ]  # those were used: see zero_advantage
    return found


def _title(view: RunView, width: int) -> Text:
    left = Text.assemble(("anabranch ", _HEAD), (view.title, _HEAD))
    right = Text.assemble((f"{view.phase}  " if view.phase else "", _GOOD), (duration(view.elapsed_s), _DIM))
    return _spread(view, left, right, width)


def _progress(view: RunView, step: StepRecord | None, width: int) -> Text:
    done = step.step if step else view.learner.step if view.learner else 0
    total = step.steps_total if step else view.learner.steps_total if view.learner else 0
    share = done / total if total else 0.0
    left = f"step {done:>{len(str(total))}}/{total or '?'} "
    right = f" {share:4.0%}  ETA {duration(step.eta_s if step else None)}"
    return Text.assemble(
        (left, _HEAD), (bar(share, max(8, width - len(left) - len(right)), ascii_only=view.ascii_only), _GOOD), right
    )


def _learner(view: RunView) -> Text:
    status = view.learner
    waiting = (
        (f"waiting for {status.waiting_for}" if status.waiting_for else status.state) if status else "not seen yet"
    )
    return Text.assemble(("learner ", _DIM), (waiting, _GOOD), no_wrap=True, overflow=_overflow(view))


def _timing(view: RunView, step: StepRecord | None) -> Text:
    line = Text.assemble(("timing  ", _DIM), no_wrap=True, overflow=_overflow(view))
    if step is None:
        return line.append("-")
    whole = step.wait_s + step.step_s + step.publish_s + step.checkpoint_s
    return line.append(
        f"{whole:.2f} s a step: wait {step.wait_s:.2f} s ({step.wait_s / max(whole, 1e-9):.0%}), train {step.step_s:.2f} s, "
        f"publish {step.publish_s:.2f} s, checkpoint {step.checkpoint_s:.2f} s"
    )


def _rewards(view: RunView, width: int) -> Text:
    rewards = [record.reward_mean for record in view.history.steps.values()]
    mean = statistics.fmean(rewards[-10:]) if rewards else None
    left = Text.assemble(("reward ", _DIM), (f"{mean:.3f} " if mean is not None else "-     ", _HEAD))
    evaluation = view.history.evaluations
    right = "held-out " + (
        " -> ".join(f"{e.mean_reward:.3f} (v{e.version})" for e in [evaluation[0], *evaluation[1:][-1:]])
        if evaluation
        else "-"
    )
    room = width - left.cell_len - len(right) - 3
    left.append(f"{sparkline(rewards, room, ascii_only=view.ascii_only):<{max(room, 0)}} ", _GOOD)
    return left.append(f"  {right}")


def _regions(view: RunView, step: StepRecord | None, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, width=width, header_style=_DIM)
    table.add_column("region", no_wrap=True)
    table.add_column("tok/s", justify="right", no_wrap=True)
    table.add_column("queue", justify="right", no_wrap=True)
    table.add_column("producer", no_wrap=True)
    table.add_column("serves", no_wrap=True)
    table.add_column("behind", justify="right", no_wrap=True)
    table.add_column("pause", justify="right", no_wrap=True)
    table.add_column("to serve", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True, overflow=_overflow(view), ratio=1)
    head = step.version if step else view.learner.version if view.learner else None
    by_region: dict[str, list[tuple[str, ProducerStatus | None]]] = {}
    nobody: list[tuple[str, ProducerStatus | None]] = [("-", None)]
    for name, known in sorted(view.producers.items()):
        by_region.setdefault(known.region, []).append((name, known))
    room = _PRODUCER_ROWS
    for region in sorted({*by_region, *(step.queue_depth if step else {})}) or ["-"]:
        members = by_region.get(region, [])
        speed = (
            sum(s.tokens_per_s for _, s in members if s)
            if members
            else (step.tokens_per_s.get(region, 0.0) if step else 0.0)
        )
        queue = str(step.queue_depth.get(region, "-")) if step else "-"
        first = (region, f"{speed:,.0f}", queue)
        for name, status in (members or nobody)[: max(room, 0)]:
            table.add_row(*first, *_producer_cells(name, status, head))
            first = ("", "", "")
            room -= 1
    if hidden := max(0, len(view.producers) - _PRODUCER_ROWS):
        table.add_row("", "", "", f"{hidden} more producers")
    return table


def _producer_cells(name: str, status: ProducerStatus | None, head: int | None) -> tuple[str, ...]:
    if status is None:
        return (name, "-", "-", "-", "-", "not seen yet")
    version = status.policy.rpartition(".v")[2]
    behind = str(max(0, head - int(version))) if version.isdigit() and head is not None else "-"
    pause = f"{status.last_swap_pause_ms:.0f} ms" if status.swaps else "-"
    serve = f"{status.publish_to_serve_ms / 1000:.2f} s" if status.swaps else "-"
    state = (
        f"waiting for {status.waiting_for}" if status.waiting_for else f"{status.state}, {status.groups_running} groups"
    )
    return (name, status.policy or "-", behind, pause, serve, state)


def _ages(view: RunView, step: StepRecord | None, width: int) -> Text:
    counts = step.age_tokens if step else {}
    total = sum(counts.values())
    rows = [(str(age), counts.get(age, 0)) for age in range(_AGE_ROWS)]
    rows.append((f"{_AGE_ROWS}+", sum(n for age, n in counts.items() if age >= _AGE_ROWS)))
    text = Text.assemble(("age of tokens trained on (versions)", _DIM))
    for label, count in rows:
        share = count / total if total else 0.0
        text.append(f"\n  {label:>2} ")
        text.append(bar(share, min(50, width - 24), ascii_only=view.ascii_only), _GOOD)
        text.append(f" {share:4.0%} {count:>9,}")
    return text


def _weights(view: RunView, step: StepRecord | None) -> Text:
    if step is None:
        return Text.assemble(("weights ", _DIM), "no update yet")
    share = step.delta_bytes / max(step.full_bytes, 1)
    return Text.assemble(
        ("weights ", _DIM),
        f"delta {size(step.delta_bytes)} of {size(step.full_bytes)} full ({share:.1%}), {step.changed_fraction:.2%} of elements changed",
        no_wrap=True,
        overflow=_overflow(view),
    )


def _health(view: RunView, step: StepRecord | None) -> Text:
    if step is None:
        return Text.assemble(("health  ", _DIM), "-")
    same = f"{step.kl_k3_same_version:.1e}" if step.kl_k3_same_version is not None else "-"
    return Text.assemble(
        ("health  ", _DIM),
        f"ESS {step.ess_token:.2f}  ratio {step.ratio_mean:.3f} (max {step.ratio_max:.2f})  masked {step.masked_fraction:.1%}"
        f"  KL {step.kl_k3:.1e} (age 0: {same})  grad {step.grad_norm:.2f}",
        no_wrap=True,
        overflow=_overflow(view),
    )


def _processes(view: RunView, width: int) -> Text:
    text = Text.assemble(("process ", _DIM), no_wrap=True, overflow=_overflow(view))
    if not view.children:
        return text.append("-")
    running = sum(child.state == "running" for child in view.children)
    restarts = sum(child.restarts for child in view.children)
    text.append(f"{running} of {len(view.children)} running, {restarts} restarts")
    for child in view.children:
        if child.restarts or child.state not in ("running", "ended"):
            times = f" {child.restarts}x" if child.restarts else ""
            text.append(
                f"  {child.name} {child.state}{times}", _WARN if child.state in ("backoff", "failed") else "none"
            )
    return text


def _alarm_lines(view: RunView, step: StepRecord | None) -> list[Text]:
    """Always two lines."""
    found = alarms(view)
    if not found:
        return [Text.assemble(("alarms  ", _DIM), "none"), Text("")]
    more = f"  (+{len(found) - 2} more)" if len(found) > 2 else ""
    lines = [Text(f"! alarm {found[0]}", style=_WARN, no_wrap=True, overflow=_overflow(view))]
    lines.append(
        Text(f"! alarm {found[1]}{more}", style=_WARN, no_wrap=True, overflow=_overflow(view))
        if len(found) > 1
        else Text("")
    )
    return lines


def _spread(view: RunView, left: Text, right: Text, width: int) -> Text:
    gap = max(1, width - left.cell_len - right.cell_len)
    return Text.assemble(left, " " * gap, right, no_wrap=True, overflow=_overflow(view))


def _overflow(view: RunView) -> OverflowMethod:
    return "crop" if view.ascii_only else "ellipsis"
