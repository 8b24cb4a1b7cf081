"""What a user meets at the prompt: help with examples that work, one clear line for a mistake, and the right exit code."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.cli.main import COMMANDS, EPILOG, build_parser, main
from anabranch.schemas.config import RunConfig

GOLDEN = Path(__file__).resolve().parent / "golden"

# commands that need no more than --config and --set
CONFIGURED = (
    "learn", "record", "config", "ledger", "weights log", "weights verify", "weights followers", "weights gc", "stream ls",
    "dead-letter ls", "permits", "replay steps", "replay ls", "replay account",
)  # fmt: skip
KINDS = {
    "weights": ("log", "show", "verify", "path", "followers", "pin", "unpin", "rollback", "gc", "keygen"),
    "dead-letter": ("ls", "show", "requeue", "drop"),
    "replay": tuple(
        ["ls", "show", "why", "diff", "group", "export", "sql", "rescore", "recompute", "account", "steps", "step"]
    ),
    "stream": ("ls", "forget-group", "forget-producer", "mend-aof"),
}


def commands() -> dict[str, argparse.ArgumentParser]:
    return sub_parsers(build_parser())


def sub_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def every_parser() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for name, parser in commands().items():
        yield name, parser
        for kind, inner in sub_parsers(parser).items():
            yield f"{name} {kind}", inner


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    code = main(argv)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith(f"anabranch {argv[0]}: ")
    return code, captured.err


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The program as a user starts it, alone."""
    command = [sys.executable, "-I", "-m", "anabranch.cli.main", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environ}
    )  # fmt: skip


def test_a_full_disk_is_one_line_and_a_temporary_failure() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-I", "-m", "anabranch.cli.main", "config"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (75, "anabranch config: the disk is full: free some and start again\n")


def test_every_command_is_there() -> None:
    assert list(commands()) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"\nexamples:\n  anabranch {name}" in capsys.readouterr().out


def examples() -> list[str]:
    lines = [EPILOG, *(parser.epilog or "" for _, parser in every_parser())]
    return sorted({line.strip() for text in lines for line in text.splitlines() if line.startswith("  anabranch ")})


@pytest.mark.parametrize("example", examples())
def test_every_example_is_a_valid_command_line(example: str) -> None:
    """Up to a pipe, a redirection, or the remark beside it."""
    words = shlex.split(example.partition("  ")[0].partition("|")[0].partition(">")[0])
    if "--print-completion" in words:
        with pytest.raises(SystemExit, match="0"):
            build_parser().parse_args(words[1:])
    else:
        assert build_parser().parse_args(words[1:]).run


def test_every_option_is_explained() -> None:
    unexplained = [
        f"{name} {action.option_strings or action.dest}"
        for name, parser in every_parser()
        for action in parser._actions
        if not action.help and action.option_strings and action.help is not argparse.SUPPRESS
    ]
    assert not unexplained


@pytest.mark.parametrize("name", CONFIGURED)
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("learner.lrr=1", "did you mean learner.lr?"),
        ("learner.steps=many", "valid integer"),
        ("stream.block_ms=9000", "must be below socket_timeout_ms"),
        ("sampling.top_p=0.5", "log-probs"),
        ("learner.lr", "not of the form"),
    ],
)
def test_a_bad_setting_is_one_line_and_78(name: str, setting: str, told: str, capsys) -> None:
    """Before anything heavy is loaded, and before any server is asked."""
    code, line = fails(capsys, *name.split(), "--set", setting)
    assert code == 78
    assert told in line


@pytest.mark.parametrize(
    ("content", "told"), [(None, "cannot read"), (b"[run", "not valid TOML"), (b"\xff", "cannot read")]
)
def test_a_bad_file_is_one_line_and_78(tmp_path: Path, content: bytes | None, told: str, capsys) -> None:
    path = tmp_path / "run file.toml"
    if content is not None:
        path.write_bytes(content)
    code, line = fails(capsys, "config", "--config", str(path))
    assert code == 78
    assert told in line
    assert "run file.toml" in line


def test_an_unknown_region_is_2_and_the_known_ones_are_told(capsys) -> None:
    settings = ["--set", "regions.east.url=redis://h:1", "--set", "regions.west.url=redis://h:2"]
    code, line = fails(capsys, "produce", "--region", "mars", *settings)
    assert code == 2
    assert "mars" in line
    assert "east, west" in line


@pytest.mark.parametrize(
    "argv",
    [
        [], ["bogus"], ["config", "--bogus"], ["produce"], ["config", "extra"], ["weights", "bogus"], ["weights", "show"],
        ["weights", "path", "nothing"], ["weights", "log", "--last", "0"], ["weights", "verify", "--producers", "--to", "3"],
        ["dead-letter", "show"], ["dead-letter", "drop"], ["dead-letter", "requeue", "1-0", "--all"], ["stream", "forget-group"],
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_2(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: anabranch" in capsys.readouterr().err


@pytest.mark.parametrize("name", KINDS)
def test_alone_it_shows_its_kinds_and_is_2(name: str, capsys) -> None:
    assert main([name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert tuple(sub_parsers(commands()[name])) == KINDS[name]
    for kind in KINDS[name]:
        assert f"\n    {kind}" in captured.err


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds])
def test_every_kind_has_examples(name: str, kind: str, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, kind, "--help"])
    assert f"\nexamples:\n  anabranch {name} {kind}" in capsys.readouterr().out


def test_an_unreachable_redis_is_75_with_its_address_and_without_its_password() -> None:
    url = "redis://:s3cret@127.0.0.1:1/0"
    done = run(
        "ledger", "--set", f"hub.url={url}", "--set", f"regions.local.url={url}", "--set",
        "channel.connect_deadline_s=1",
    )  # fmt: skip
    assert done.returncode == 75
    assert "redis://:***@127.0.0.1:1/0" in done.stderr
    assert "region local" in done.stderr
    assert "within 1.0 s" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "s3cret" not in done.stdout + done.stderr


def test_the_layers_of_the_configuration(tmp_path: Path) -> None:
    """File, then environment, then --set; and what is shown can be given back with --config."""
    file = tmp_path / "run.toml"
    file.write_text("[learner]\nsteps = 5\nlr = 1e-6\nwarmup_steps = 1\n")
    environ = {"ANABRANCH__LEARNER__STEPS": "12", "ANABRANCH__LEARNER__LR": "1e-5", "ANABRANCH_LOG_LEVEL": "info"}
    done = run("config", "--config", str(file), "--set", "learner.lr=1e-4", **environ)
    assert done.returncode == 0, done.stderr
    learner = tomllib.loads(done.stdout)["learner"]
    assert (learner["steps"], learner["lr"], learner["warmup_steps"]) == (12, 1e-4, 1)
    file.write_text(done.stdout)
    assert run("config", "--config", str(file)).stdout == done.stdout


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    done = run("config", ANABRANCH__LEARNER__STEPS="many")
    assert done.returncode == 78
    assert "ANABRANCH__LEARNER__STEPS" in done.stderr


def test_shown_configuration_masks_passwords(capsys) -> None:
    assert main(["config", "--set", "hub.url=redis://:s3cret@h:1/0"]) == 0
    shown = capsys.readouterr().out
    assert "s3cret" not in shown
    assert "redis://:***@h:1/0" in shown


def test_every_key_is_listed_with_its_meaning(capsys) -> None:
    assert main(["config", "--keys"]) == 0
    table = capsys.readouterr().out
    for section, field in RunConfig.model_fields.items():
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"| `{section}.{key}` |" in table
    assert "| `regions.NAME.url` |" in table


@pytest.mark.parametrize(("shell", "check"), [("bash", "-n"), ("zsh", "-n")])
def test_shell_completion_is_printed(shell: str, check: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", shell])
    assert end.value.code == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    for name in COMMANDS:
        assert name in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, check, str(script)], check=True, timeout=20)


@pytest.mark.parametrize("argv", [["config"], ["config", "--keys"]])
def test_a_reader_that_goes_away_is_no_error(argv: list[str]) -> None:
    """`anabranch config | head -1`"""
    command = [sys.executable, "-I", "-m", "anabranch.cli.main", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_a_table_whose_reader_goes_away_is_no_error() -> None:
    """rich handles a broken pipe itself, by ending the program with 1."""
    command = [
        sys.executable,
        "-I",
        "-m",
        "anabranch.cli.main",
        "delta",
        "show",
        str(GOLDEN / "delta.abdelta"),
        "--all",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("fds", [(1,), (2,), (1, 2)])
def test_closed_outputs_do_not_fail_the_work(fds: tuple[int, ...]) -> None:
    command = [sys.executable, "-I", "-m", "anabranch.cli.main", "delta", "show", str(GOLDEN / "delta.abdelta")]
    closing = " ".join(f"{fd}>&-" for fd in fds)
    done = subprocess.run(["sh", "-c", f'exec "$@" {closing}', "sh", *command], timeout=60, check=False)
    assert done.returncode == 0


def test_a_bug_is_70_with_its_traceback(monkeypatch, capsys) -> None:
    def broken(config: RunConfig) -> str:
        raise KeyError("redis://:s3cret@h:1")

    monkeypatch.setattr("anabranch.schemas.config.dump_toml", broken)
    assert main(["config"]) == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "s3cret" not in shown


def test_the_version_is_told(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("anabranch 0.")


def test_what_the_terminal_cannot_show_is_escaped() -> None:
    script = "import sys; from anabranch.cli import main; main._open_outputs(); print('caf\\u00e9 \\udcff')"
    done = subprocess.run(
        [sys.executable, "-I", "-X", "utf8=0", "-c", script],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"caf\\xe9 \\udcff\n"), done.stderr
