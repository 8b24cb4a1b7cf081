"""What the learner writes beside its checkpoints."""

from __future__ import annotations

import tomllib
from pathlib import Path

from anabranch.learner.service import write_resolved
from anabranch.schemas.config import load_config


def test_the_users_own_configuration_in_the_run_directory_keeps_its_passwords(tmp_path: Path) -> None:
    mine = tmp_path / "config.toml"
    mine.write_text('[hub]\nurl = "redis://:s3cret@h:1/0"\n')
    write_resolved(tmp_path, load_config(mine.read_text()))
    assert "s3cret" in mine.read_text()
    (written,) = set(tmp_path.iterdir()) - {mine}
    assert tomllib.loads(written.read_text())["hub"]["url"] == "redis://:***@h:1/0"
