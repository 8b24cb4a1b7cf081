"""A picture of any tallies, in the format that its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.consumers.drops import tally
from anabranch.deploy.drops_plot import check_name, write_drops_plot
from anabranch.schemas.errors import UsageError
from tests.fates import record

SOME = [
    record(seq=s, fate=fate, region=region) for s in range(4) for fate in ("trained", "dropped:age") for region in "ab"
]


@pytest.mark.parametrize("records", [[], SOME[:1], SOME], ids=["none", "one", "some"])
def test_any_tallies_plot(tmp_path: Path, records: list) -> None:
    write_drops_plot(tally(records), tmp_path / "drops.png", title="run")
    assert (tmp_path / "drops.png").read_bytes().startswith(b"\x89PNG")


def test_an_svg_names_what_it_shows(tmp_path: Path) -> None:
    write_drops_plot(tally(SOME), tmp_path / "drops.svg", title="my run")
    text = (tmp_path / "drops.svg").read_text()
    for words in ("my run: groups by fate", "trained (8)", "age (8)", "tokens a rollout", "reward"):
        assert words in text, words


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--plot drops.txt: name it NAME\.svg, NAME\.png, NAME\.pdf"):
        check_name(Path("drops.txt"))
