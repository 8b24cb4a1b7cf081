"""What a run is, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.deploy.replay_source import checked_directory, open_source
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import StreamUnavailableError, UsageError
from tests.replay_runs import write_run


def test_a_run_directory_with_its_settings(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with open_source(str(run), None) as source:
        assert source.directory == run
        assert source.setting("correction", "max_age") == 8
        assert source.setting("nothing", "here") is None
        assert source.reader.rows("SELECT count(*) AS n FROM trajectories") == [{"n": 14}]


def test_a_configuration_names_its_run_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    config = RunConfig.model_validate({"run": {"name": "run", "dir": str(tmp_path)}})
    with open_source(None, config) as source:
        assert source.directory == tmp_path / "run"


def test_without_a_directory_the_streams_are_read(tmp_path: Path) -> None:
    url = "redis://127.0.0.1:1/0"
    config = RunConfig.model_validate(
        {"run": {"dir": str(tmp_path)}, "regions": {"east": {"url": url}}, "channel": {"connect_deadline_s": 0.1}}
    )
    with pytest.raises(StreamUnavailableError), open_source(None, config):
        pass


def test_a_store_is_asked_with_the_options_of_the_recorders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "anabranch.consumers.run_mirror.mirror_run",
        lambda url, *, options: asked.append((url, options)) or write_run(tmp_path / str(len(asked))),
    )
    for recorder in ({"store": "s3://b", "store_options": {"region": "mine"}}, {}):
        config = RunConfig.model_validate({"recorder": recorder, "channel": {"blob_options": {"region": "weights"}}})
        with open_source("s3://b/run", config):
            pass
    assert asked == [("s3://b/run", {"region": "mine"}), ("s3://b/run", {"region": "weights"})]


def test_a_store_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = write_run(tmp_path / "store")
    with open_source(f"file://{run}", None) as source:
        assert source.reader.rows("SELECT count(*) AS n FROM trajectories") == [{"n": 14}]
        assert source.setting("correction", "max_age") == 8


@pytest.mark.parametrize(
    ("name", "told"), [("rum", "nearest in .*: run"), ("", "runs in it: run"), ("empty", "neither trajectories")]
)
def test_what_is_no_run_is_refused_with_the_nearest(tmp_path: Path, name: str, told: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=told):
        checked_directory(tmp_path / name)
