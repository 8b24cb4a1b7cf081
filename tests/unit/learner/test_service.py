"""What the learner writes beside its checkpoints, and that it says that it lives."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest

from anabranch.consumers.fate_files import FATES_DIRECTORY
from anabranch.consumers.fate_log import FateLog
from anabranch.learner import service
from anabranch.learner.service import RESOLVED_FILE, Heartbeat, write_resolved
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import FateLogError
from anabranch.transport.runtime import StopSignal
from tests.checkpoint_stores import Counter


def test_the_users_own_configuration_in_the_run_directory_keeps_its_passwords(tmp_path: Path) -> None:
    mine = tmp_path / "config.toml"
    mine.write_text('[hub]\nurl = "redis://:s3cret@h:1/0"\n')
    write_resolved(tmp_path, load_config(mine.read_text()))
    assert "s3cret" in mine.read_text()
    (written,) = set(tmp_path.iterdir()) - {mine}
    assert tomllib.loads(written.read_text())["hub"]["url"] == "redis://:***@h:1/0"


def test_a_second_learner_in_a_run_directory_ends_and_leaves_what_the_first_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("connect_hub", "connect_regions"):
        monkeypatch.setattr(service, name, lambda _: None)
    config = load_config("", overrides=[f"run.dir={tmp_path}"])
    first = FateLog(config.run.directory / FATES_DIRECTORY, file_lines=100)
    try:
        with pytest.raises(FateLogError, match="another learner writes to"):
            service._lead(config, cast(Any, Counter()), StopSignal(), Heartbeat())
    finally:
        first.close()
    assert not (config.run.directory / RESOLVED_FILE).exists()


def test_a_heartbeat_is_sent_at_once_and_never_floods_its_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of a datagram socket is short, and a sender waits where it is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        beat = Heartbeat()
        for _ in range(10_000):
            beat()
        assert listener.recv(100) == b"WATCHDOG=1"
