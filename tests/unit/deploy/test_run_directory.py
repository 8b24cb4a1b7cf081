"""One demo per directory, resumed only under the same settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.deploy.run_directory import check_disk, check_same_configuration, claim, is_complete, write_config
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.errors import ConfigError, TemporaryError

HOLD = """
import sys, time
from pathlib import Path
from anabranch.deploy.run_directory import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def config(*overrides: str) -> RunConfig:
    return load_config(overrides=["run.name=r", 'hub.url="redis://:secret@127.0.0.1:5001/0"', *overrides])


def test_a_second_demo_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-I", "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TemporaryError, match=rf"in use by another demo \(pid {holder.pid}\)"), claim(tmp_path):
            pass
    finally:
        holder.communicate()
    with claim(tmp_path):
        pass


def test_a_lock_whose_owner_is_dead_is_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    with claim(tmp_path) as lock:
        ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
        ended.wait()
        (tmp_path / ".lock").write_text(str(ended.pid))
        assert lock >= 0
        with pytest.raises(TemporaryError, match="in use"), claim(tmp_path, deadline_s=0.3):
            pass


def test_a_directory_that_is_new_has_nothing_to_resume(tmp_path: Path) -> None:
    assert check_same_configuration(tmp_path, config()) is False


def test_the_same_settings_resume_wherever_the_servers_and_the_model_are(tmp_path: Path) -> None:
    path = write_config(tmp_path, config())
    assert "secret" not in path.read_text()
    other = config('hub.url="redis://:other@127.0.0.1:6002/0"', "model.path=/elsewhere", "run.dir=/elsewhere")
    assert check_same_configuration(tmp_path, other) is True


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    write_config(tmp_path, config())
    with pytest.raises(ConfigError) as error:
        check_same_configuration(tmp_path, config("learner.lr=0.5", "learner.target_reward=0.9"))
    assert "learner.lr is 1e-05 there and 0.5 here" in str(error.value)
    assert "learner.target_reward is 'unset' there and 0.9 here" in str(error.value)
    assert "--name" in str(error.value)


def test_another_region_is_another_configuration(tmp_path: Path) -> None:
    write_config(tmp_path, config("regions={east={}}"))
    assert check_same_configuration(tmp_path, config("regions={east={}}")) is True
    with pytest.raises(ConfigError, match=r"regions\.west"):
        check_same_configuration(tmp_path, config("regions={east={},west={}}"))


def test_a_run_is_complete_only_when_its_record_says_so(tmp_path: Path) -> None:
    assert is_complete(tmp_path) is False
    (tmp_path / "run.json").write_text('{"compl')
    assert is_complete(tmp_path) is False
    for value in (False, True):
        (tmp_path / "run.json").write_text(json.dumps({"completed": value}))
        assert is_complete(tmp_path) is value


def test_too_little_room_is_one_clear_line(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "there" / "yet", 1, "the demo")
    with pytest.raises(TemporaryError, match=r"the demo needs 1000000000\.0 GB under .*; make room first"):
        check_disk(tmp_path / "not" / "there" / "yet", 10**18, "the demo")
