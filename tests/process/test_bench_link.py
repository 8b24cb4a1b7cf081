"""`anabranch bench link` measures what it says, over a link that is really slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.deploy import bench_link
from anabranch.deploy.bench_link import Row, table
from anabranch.schemas.errors import ConfigError
from tests.links import PROGRAM, slow_link

pytestmark = pytest.mark.process
KEYS = {
    "model", "route", "congestion", "slow_start_after_idle", "payload_bytes", "chunks", "updates",
    "publish_to_offer_ms", "encode_ms", "decode_ms", "link_ms", "link_ms_max", "target_ms", "kept",
}  # fmt: skip


def test_rows_of_both_routes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow_link()  # skips where there is none
    monkeypatch.setitem(bench_link.MODELS, "tiny", (200_000, 0.3))
    monkeypatch.setattr(bench_link, "congestion_controls", lambda: ["reno"])
    words = ["--program", str(PROGRAM), "--model", "tiny", "--rtt-ms", "60", "--updates", "2", "--pause-s", "0.1"]
    assert main(["bench", "link", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["route"], row["slow_start_after_idle"]) for row in rows] == [
        ("replica", True), ("hub", True), ("replica", False), ("hub", False),
    ]  # fmt: skip
    for row in rows:
        assert row.keys() == KEYS
        assert row["updates"] == 2
        one_way_ms = 30 * (1 if row["route"] == "replica" else 3)  # the hub is asked for head, manifest and chunk
        assert row["publish_to_offer_ms"] > one_way_ms + row["payload_bytes"] / 12.5e6 * 1e3
        assert 0 < row["encode_ms"] + row["decode_ms"] < row["publish_to_offer_ms"]
        assert row["target_ms"] == pytest.approx(6 * 60 + row["payload_bytes"] / 12.5e6 * 1e3, abs=0.1)
        assert row["kept"] == (row["link_ms"] <= row["target_ms"])


def test_the_table_shows_every_row() -> None:
    row = Row("tiny", "hub", "cubic", True, 1_234, 1, 5, 700.0, 20.0, 10.0, 670.0, 700.0, 900.1)
    drawn = table([row, row])
    assert drawn.row_count == 2
    assert [column._cells[0] for column in drawn.columns][:5] == ["tiny", "hub", "cubic", "yes", "1,234"]


def test_without_its_program_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no slow link: .*(root|/dev/net/tun|nowhere\.py)"):
        list(bench_link.bench_link(tmp_path / "nowhere.py", models=["tiny"]))
