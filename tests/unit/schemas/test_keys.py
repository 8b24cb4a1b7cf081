"""Every key stands under its run, and no two things share one."""

from __future__ import annotations

import inspect

from anabranch.schemas import keys as module
from anabranch.schemas.keys import Keys


def every_key(run: str) -> dict[str, str]:
    keys = Keys(run)
    found = {name: getattr(keys, name) for name, kind in inspect.getmembers(Keys) if isinstance(kind, property)}
    found["manifest"] = keys.manifest(1, 2, "delta")
    found["layout"] = keys.layout("f" * 32)
    found["blob"] = keys.blob("f" * 32)
    found["cached_blob"] = keys.cached_blob("f" * 32)
    found["cache_fetch"] = keys.cache_fetch("f" * 32)
    found["share"] = keys.share(1, 2, "delta")
    found["evaluation_results"] = keys.evaluation_results(1, 2)
    return found


def test_keys_stand_under_their_run_and_differ() -> None:
    keys = every_key("run")
    assert all(key.startswith("ab:run:") for key in keys.values())
    assert len(set(keys.values())) == len(keys)


def test_runs_do_not_meet() -> None:
    """A run named like the beginning of another must not find the other's keys by prefix."""
    assert not set(every_key("a").values()) & set(every_key("a.b").values())
    assert not any(key.startswith("ab:a:") for key in every_key("a.b").values())


def test_a_manifest_key_is_its_prefix_and_where_it_stands() -> None:
    assert Keys("r").manifest(3, 4, "anchor") == Keys("r").manifest_prefix + "3:4:anchor"


def test_every_key_is_in_the_catalogue() -> None:
    assert module.__doc__ is not None
    for name, key in every_key("{run}").items():
        listed = key.replace("f" * 32, "HASH" if name == "layout" else "DIGEST")
        listed = listed.replace(":1:2:delta", ":E:V:LABEL").replace(":1:2", ":E:V")
        if name != "manifest_prefix":
            assert listed in module.__doc__, f"{name}: {listed} is not described in schemas/keys.py"
