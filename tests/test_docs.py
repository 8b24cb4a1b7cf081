"""The documentation says what the code does: generated parts are up to date, and what pages show exists.

Text in a page is checked, not run: command lines go through the real parser, keys through the real models, quoted error
messages are looked up among the strings of the source.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from anabranch.cli.main import build_parser
from anabranch.producers.environments import Task
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.keys import Keys
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.metrics import StepRecord
from anabranch.schemas.trajectory import SCHEMA

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
CODE = ("schemas", "kernels", "transport", "producers", "consumers", "learner", "deploy", "src/anabranch/cli")
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
FENCE = re.compile(r"^(\s*)```(\w*)\n(.*?)^\s*```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


pages = pytest.mark.parametrize("page", PAGES, ids=name)


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text("utf-8"))


def code_lines(text: str) -> list[str]:
    """Lines of code blocks (fenced, indented, comments of an example), continuation lines joined."""
    lines = [line for match in FENCE.finditer(text) for line in match[3].splitlines()]
    lines += [line for line in FENCE.sub("", text).splitlines() if re.match(r"(    |#)\s*\S", line)]
    return "\n".join(line.strip("# ") for line in lines).replace("\\\n", " ").splitlines()


# --- generated parts


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_up_to_date() -> None:
    stale = [name(path) for path, text in generator().pages().items() if path.read_text("utf-8") != text]
    assert not stale, f"run `make docs`: {', '.join(stale)}"


def test_the_hex_example_shows_every_byte_and_bit_of_the_committed_file() -> None:
    """What the bytes mean is read by the reference decoder; here nothing is left out and nothing is made up."""
    stored = (ROOT / "tests/golden/delta.abdelta").read_bytes()
    (dump,) = (m[3] for m in FENCE.finditer((ROOT / "docs/delta-format.md").read_text("utf-8")))
    head, *chunks = dump.split("\n\n")
    assert _shown(head) == stored[:28]
    at = int(re.findall(r"at (\d+) begin the chunks", head)[0])
    for chunk in chunks:
        size, start = map(int, re.findall(r"^chunk \d+, (\d+) bytes, at (\d+)$", chunk, re.MULTILINE)[0])
        assert start == at
        assert _shown(chunk) == stored[at : at + size]
        bits = "".join(re.findall(r"^  bit +\d+  ([01]+) ", chunk, re.MULTILINE))
        stream = np.packbits([int(b) for b in bits], bitorder="little").tobytes() if bits else b""
        assert _shown(chunk).endswith(stream)
        at += size
    assert at == len(stored)


def _shown(dump: str) -> bytes:
    return bytes.fromhex("".join(re.findall(r"^ *\d+  ((?:[0-9a-f]{2} ?)+)", dump, re.MULTILINE)))


# --- links


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)}


@pages
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


# --- command lines


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments of every `anabranch ...` that `text` shows, in code or in an inline span."""
    for line in code_lines(text) + SPAN.findall(FENCE.sub("", text)):
        match = re.match(r"(?:\$ )?(?:\S+=\S+ )*(?:anabranch|.*-(?:m|-module) anabranch\.cli\.main)\s+(.*)", line)
        if match is None or re.search(r"[|]\w|…|\bCOMMAND\b", match[1]):
            continue
        command = re.split(r"\s[|>&]|\s{3,}|\s#|;", match[1])[0]
        words = shlex.split(command)
        named = len(words) <= 2 and all(word.isalpha() for word in words)
        yield [*words, "--help"] if named else words  # a bare name is prose about the command


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name)
def test_command_lines_parse(page: Path) -> None:
    refused = []
    for words in command_lines(page.read_text("utf-8")):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                args = build_parser().parse_args(words)
        except SystemExit as end:
            if end.code:
                refused.append(f"anabranch {shlex.join(words)}: {said.getvalue().strip().splitlines()[-1]}")
            continue
        keys = [override.partition("=")[0] for override in getattr(args, "overrides", [])]
        refused += [f"anabranch {shlex.join(words)}: no key {key}" for key in keys if not is_key(key)]
    assert not refused


def test_command_lines_are_found() -> None:
    """The pages show commands: a reader of this test must not be fooled by a pattern that matches nothing."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert {"demo", "learn", "produce", "record", "config", "ledger"} <= {words[0] for words in command_lines(text)}


@pages
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    shown = [m for s in [*code_lines(text), *SPAN.findall(prose(page))] for m in re.findall(r"^make ([a-z]+)", s)]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(shown) <= set(targets)


# --- configuration


def known_keys(model: Any = RunConfig, prefix: str = "") -> Iterator[str]:
    for key, field in model.model_fields.items():
        kind = field.annotation
        inner = getattr(kind, "__args__", (kind,))[-1]
        yield prefix + key
        if hasattr(inner, "model_fields"):
            yield from known_keys(inner, f"{prefix}{key}." + ("NAME." if inner is not kind else ""))


def is_key(key: str) -> bool:
    key = re.sub(r"^regions\.[^.]+", "regions.NAME", key)
    free = re.sub(r"^(learner\.deepspeed|task\.params)\..*", r"\1", key)
    return key == "regions.NAME" or free in set(known_keys())


@pages
def test_keys_in_backticks_exist(page: Path) -> None:
    sections = "|".join(RunConfig.model_fields)
    files = re.compile(r"\.(toml|json|jsonl|safetensors|weight|py|md)$")
    missing = [
        key
        for span in SPAN.findall(prose(page))
        for key in re.findall(rf"^(?:--set )?((?:{sections})\.[A-Za-z_][\w.]*)", span)
        if not files.search(key) and not is_key(key)
    ]
    assert not missing


@pages
def test_environment_variables_name_keys(page: Path) -> None:
    found = re.findall(r"ANABRANCH__([A-Z0-9_]*[A-Z0-9])", page.read_text("utf-8"))
    assert [v for v in found if v != "A__B" and not is_key(v.lower().replace("__", "."))] == []


@pages
def test_toml_blocks_are_valid_configurations(page: Path) -> None:
    for match in FENCE.finditer(page.read_text("utf-8")):
        if match[2] == "toml":
            load_config(match[3], source=name(page))


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples_are_valid_configurations(example: Path) -> None:
    text = example.read_text("utf-8")
    config = load_config(text, source=name(example))
    assert set(config.regions) == set(tomllib.loads(text)["regions"])


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
@pytest.mark.parametrize("preset", ["tiny", "smollm2"])
def test_examples_fit_over_the_demo_presets(example: Path, preset: str) -> None:
    beneath = (ROOT / "deploy" / "presets" / f"{preset}.toml").read_text("utf-8")
    load_config(example.read_text("utf-8"), source=name(example), beneath=beneath)


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples_stand_alone(example: Path) -> None:
    """Without a preset beneath, for the byte-level model that `anabranch model tiny` makes: prompts fit, gold answers score."""
    config = load_config(example.read_text("utf-8"), source=name(example))
    task, room = Task(config.task, config.run.seed), config.task.max_prompt_tokens
    problems = [task.heldout(i) for i in range(config.task.heldout_size)] + [task.prompt(i) for i in range(200)]
    assert max(len(problem.prompt_text.encode()) for problem in problems) <= room
    assert max(len(problem.answer.encode()) for problem in problems) < config.sampling.max_tokens  # and the end of text
    assert {task.score(problem, problem.answer) for problem in problems} == {1.0}
    assert {task.score(problem, f"no{problem.answer}") for problem in problems} == {0.0}


# --- tables of fields


def first_cells(page: str) -> set[str]:
    """Everything in backticks in the first column of the tables of docs/`page`."""
    rows = re.findall(r"^\|([^|]*)\|", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)
    return {span for row in rows for span in SPAN.findall(row)}


def test_every_field_of_a_step_is_explained() -> None:
    assert set(StepRecord.model_fields) - {"event"} <= first_cells("staleness.md")


def test_the_wire_tables_are_complete() -> None:
    cells = first_cells("wire-format.md")
    assert {key for key in Envelope("p", 0, 0, b"").seal()} <= cells
    assert set(Manifest.model_fields) <= cells
    text = (ROOT / "docs/wire-format.md").read_text("utf-8")
    assert [f.name for f in SCHEMA if f"| `{f.name}` | {f.type} |" not in text] == []


def test_every_redis_key_and_script_is_listed() -> None:
    keys = Keys("NAME")
    plain = {str(getattr(keys, p)) for p, v in vars(Keys).items() if isinstance(v, property) and p != "manifest_prefix"}
    made = {
        keys.manifest("E", "V", "LABEL"), keys.share("E", "V", "LABEL"), keys.layout("HASH"), keys.blob("DIGEST"),
        keys.cached_blob("DIGEST"), keys.cache_fetch("DIGEST"), keys.evaluation_results("E", "V"),
    }  # type: ignore[arg-type]  # fmt: skip
    assert plain | made == {cell for cell in first_cells("redis-keys.md") if cell.startswith("ab:")}
    text = (ROOT / "docs/redis-keys.md").read_text("utf-8")
    assert [p.stem for p in (ROOT / "transport/lua").glob("*.lua") if f"`{p.stem}`" not in text] == []


def test_every_direct_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    rows = set(re.findall(r"^\| ([a-z][a-z0-9-]*) \|", (ROOT / "docs/development.md").read_text("utf-8"), re.MULTILINE))
    assert {re.split(r"[<>=!~; \[]", requirement)[0] for requirement in wanted} == rows - {"package"}


# --- error messages


@cache
def source_strings() -> str:
    """Every string of the source, one a line; what is filled in at run time is `<>`."""
    found = []
    for folder in (*CODE, "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "<>" for v in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join([*found, *StepRecord.model_fields])


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (.*?) \| ", (ROOT / "docs/troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    wait = "gave up after <> s waiting for "
    unknown = []
    for span in (span for row in rows for span in SPAN.findall(row)):
        message = re.sub(r"<\.\.\.>", "<>", span)
        parts = message.removeprefix(wait).split("; ") if message.startswith(wait) else [message]
        unknown += [span for part in parts if not any(form in source_strings() for form in _forms(part))]
    assert not unknown


def _forms(message: str) -> list[str]:
    """A message may end in something that the code appends: `...; <>`."""
    return [message, message.removesuffix("<>"), message.removesuffix("; <>"), message.removesuffix(" <>")]


def test_config_errors_are_errors_of_this_project() -> None:
    """What the checks above lean on: an invalid block or example does raise."""
    with pytest.raises(AnabranchError, match="learner"):
        load_config("[learner]\nlearning_rate = 1\n")
