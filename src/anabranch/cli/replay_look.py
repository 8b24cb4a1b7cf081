"""The parsers of `anabranch replay` that look at recorded trajectories."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anabranch.cli.common import add_config_arguments
from anabranch.cli.kinds import kind_parser

_RUN = " --run runs/demo"


def adders() -> tuple[Any, ...]:
    return (
        _add_ls, _add_show, _add_why, _add_diff, _add_group, _add_export, _add_sql, _add_rescore, _add_recompute, _add_account,
    )  # fmt: skip


def _kind(kinds: Any, name: str, about: str, examples: str, more: str = "") -> argparse.ArgumentParser:
    return kind_parser(kinds, "replay", name, about, examples, more, run)


def _add_source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which run")
    group.add_argument(
        "--run", metavar="DIR|URL", dest="recorded_run",
        help="run directory (runs/NAME), or URL of an object store (recorder.store); default: that of --config",
    )  # fmt: skip
    group.add_argument(
        "--streams", action="store_true",
        help="also what is in the streams of --config and not recorded yet; a run without a directory here is read so anyway",
    )  # fmt: skip
    add_config_arguments(parser)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("filters", "all given ones hold. RANGE: 5, 5..9, 5.. or ..9, both ends included")
    group.add_argument("--step", metavar="RANGE", help="consumed by these steps")
    group.add_argument("--version", metavar="V", help="some token sampled by e1.v40, 40, 38..42 or e1.v38..42")
    group.add_argument("--age", metavar="RANGE", help="versions between its oldest token and its fate")
    group.add_argument("--reward", metavar="RANGE", help="such a reward")
    group.add_argument("--tokens", metavar="RANGE", help="so many tokens in the completion")
    group.add_argument("--group-index", metavar="RANGE", help="of these group indices")
    group.add_argument("--region", metavar="NAME", help="of this region")
    group.add_argument("--producer", metavar="ID", help="of this producer")
    group.add_argument(
        "--fate", metavar="FATE", help="trained, dropped, a cause such as age or zero_variance, or pending"
    )
    group.add_argument("--text", metavar="TEXT", help="with this in prompt or completion, whatever its case")


def _add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=what)


def _add_ls(kinds: Any) -> None:
    parser = _kind(
        kinds, "ls", "recorded trajectories: filtered, sorted, a page at a time",
        f"{_RUN}\n{_RUN} --fate age --sort age:desc\n{_RUN} --step 12 --reward 0 --text sorry\n{_RUN} --version e1.v40 --json\n"
        " --config run.toml --streams\n",
        "sampled by: the policies of its tokens. age: versions between its oldest token and its fate. fate: trained, the cause\n"
        "of its drop, or pending. Without --sort the newest come first.",
    )  # fmt: skip
    _add_source(parser)
    _add_filters(parser)
    parser.add_argument(
        "--sort", metavar="COLUMN", default="appended_ms:desc", help="COLUMN:desc for the highest first (default appended_ms:desc)"
    )  # fmt: skip
    parser.add_argument("--limit", type=_at_least(1), metavar="N", default=20, help="rows of a page (default 20)")
    parser.add_argument("--page", type=_at_least(1), metavar="N", default=1, help="which page (default 1)")
    _add_json(parser, "one JSON object a line, one line a trajectory")


def _add_show(kinds: Any) -> None:
    parser = _kind(
        kinds, "show", "everything that was recorded of one trajectory",
        f" east/east-0-c0ffee/17/3{_RUN}\n 17/3{_RUN} --all-tokens\n 17/3{_RUN} --json\n",
        "ID: as `ls` shows it; region and producer may be cut short or left out, as long as one trajectory is meant. ratio: of\n"
        "the learner's log-prob to the recorded one. factor: what a token's gradient was multiplied by, 0 where it was masked.",
    )  # fmt: skip
    _add_id(parser)
    _add_source(parser)
    _add_tokens(parser)
    _add_json(parser, "one JSON object with every column")


def _add_why(kinds: Any) -> None:
    parser = _kind(
        kinds, "why", "its whole life: permit, versions, reward, appended, trained in which step or dropped by which rule",
        f" east/east-0-c0ffee/17/3{_RUN}\n 17{_RUN}\n 17/3{_RUN} --json\n",
        "Times are those of the records, each by the clock of the machine that made it. What no record tells is said to be\n"
        "unknown. Without /SAMPLE: of the whole group.",
    )  # fmt: skip
    _add_id(parser)
    _add_source(parser)
    _add_json(parser, "one JSON object")


def _add_diff(kinds: Any) -> None:
    parser = _kind(
        kinds, "diff", "two trajectories, and where they part",
        f" 17/0 17/3{_RUN}\n east/east-0-c0ffee/17/0 west/west-0-beef01/4/2{_RUN} --json\n",
    )  # fmt: skip
    parser.add_argument("a", metavar="A", help="an id, as `ls` shows it")
    parser.add_argument("b", metavar="B", help="another")
    _add_source(parser)
    _add_json(parser, "one JSON object")


def _add_group(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "group",
        "the rollouts of a group side by side",
        f" east/east-0-c0ffee/17{_RUN}\n 17{_RUN}\n 17{_RUN} --json\n",
    )
    parser.add_argument("id", metavar="ID", help="of a group, or of one of its trajectories")
    _add_source(parser)
    parser.add_argument("--all-lines", action="store_true", help="of long completions too")
    _add_json(parser, "one JSON object a rollout, every column")


def _add_export(kinds: Any) -> None:
    parser = _kind(
        kinds, "export", "write trajectories as JSON lines, Parquet or safetensors",
        f" out.jsonl{_RUN}\n out.parquet{_RUN} --step 10..20\n out.safetensors{_RUN} --fate trained\n"
        f" -{_RUN} --columns id,reward,text --limit 5\n",
        "In the order of appending. A safetensors file holds all tokens as one tensor, with offsets (docs/replay.md).",
    )  # fmt: skip
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="appears when it is whole; - for JSON lines on the output"
    )
    _add_source(parser)
    _add_filters(parser)
    parser.add_argument("--format", choices=("jsonl", "parquet", "safetensors"), help="default: by the name's end")
    parser.add_argument("--columns", metavar="A,B", help="only these columns, of those that `replay sql` knows")
    parser.add_argument("--limit", type=_at_least(1), metavar="N", help="at most N")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def _add_sql(kinds: Any) -> None:
    parser = _kind(
        kinds, "sql", "ask anything of the records, in SQL (DuckDB)",
        f" 'SELECT fate, count(*) FROM trajectories GROUP BY ALL'{_RUN}\n"
        f" 'SELECT step, avg(reward) FROM trajectories GROUP BY step ORDER BY step'{_RUN} --json\n"
        f" 'DESCRIBE trajectories'{_RUN}\n",
        "Views: trajectories, fates, steps, evaluations, notes, versions, rollouts, facts (docs/replay.md has their columns). A\n"
        "query only reads, and reads nothing but the run.",
    )  # fmt: skip
    parser.add_argument("sql", metavar="SQL", help="one SELECT; or DESCRIBE, SHOW TABLES, SUMMARIZE")
    _add_source(parser)
    parser.add_argument(
        "--limit",
        type=_at_least(1),
        metavar="N",
        default=200,
        help="rows of the table (default 200); no bound for --json",
    )
    parser.add_argument(
        "--timeout", type=_at_least(1), metavar="S", default=60, help="seconds it may take (default 60)"
    )
    _add_json(parser, "one JSON object a row, all rows")


def _add_rescore(kinds: Any) -> None:
    parser = _kind(
        kinds, "rescore", "another reward over recorded text: how many rewards change",
        f"{_RUN} --with mine.py:reward\n{_RUN} --with package.module:reward --step 10..20 --json\n"
        f"{_RUN} --task --set task.answer_pattern='([0-9]+)'\n",
        "--with: called with prompt, text and answer, returns a number. It is your code, and runs as such. --task: the run's own\n"
        "environment, with what --set changes in [task]. Nothing recorded is changed.",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--with", dest="function", metavar="MODULE:FUNCTION", help="module.name:function, or file.py:function"
    )
    which.add_argument("--task", action="store_true", help="the environment of [task]")
    _add_source(parser)
    _add_filters(parser)
    _add_json(parser, "one JSON object")


def _add_recompute(kinds: Any) -> None:
    parser = _kind(
        kinds, "recompute", "its log-probs under any published version, beside the recorded ones",
        " 17/3 --version e1.v40 --config run.toml\n 17/3 --version head --config run.toml --json\n"
        " 17/3 --model models/tiny --run runs/demo\n",
        "The weights come from the channel, which must hold a way to that version (`anabranch weights log`), or with --model from a\n"
        "folder; versions.jsonl then tells which version they are.",
    )  # fmt: skip
    _add_id(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--version", metavar="V", help="e1.v42, 42 (of the head's epoch) or head")
    which.add_argument("--model", metavar="DIR", type=Path, help="a Hugging Face folder instead")
    _add_source(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="to compute in (default float32)"
    )
    _add_tokens(parser)
    _add_json(parser, "one JSON object")


def _add_account(kinds: Any) -> None:
    parser = _kind(
        kinds, "account", "whether every trajectory has a whole life in the records, or what is missing",
        f"{_RUN}\n{_RUN} --json\n{_RUN} --without-times\n",
        "Exit 1 if anything is missing that should be there. A group without a fate is open: the run goes on, or it was cut off.",
    )  # fmt: skip
    _add_source(parser)
    parser.add_argument(
        "--without-times", action="store_true", help="of a run of an earlier version: a moment without a time is no gap"
    )
    _add_json(parser, "one JSON object")


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="REGION/PRODUCER/SEQ/SAMPLE, as `ls` shows it, or its unique end")


def _add_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all-tokens", action="store_true", help="all of them, not the first 64")


def _at_least(least: int) -> Any:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return parse


def run(args: argparse.Namespace) -> int:
    from anabranch.cli.replay_look_commands import COMMANDS

    return COMMANDS[args.kind](args)
