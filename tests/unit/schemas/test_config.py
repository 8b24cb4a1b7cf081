"""Layers, errors and dumps of the configuration: every mistake is one ConfigError that says what to change."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from anabranch.schemas.config import RunConfig, dump_json, dump_toml, load_config
from anabranch.schemas.errors import ConfigError, UnsafeSamplingError

TOML = """
[run]
name = "from-file"
[learner]
lr = 1e-6
steps = 7
"""


def test_defaults_are_valid() -> None:
    assert load_config() == RunConfig()


def test_runs_that_share_a_disk_share_no_spool() -> None:
    """Else a producer would send what another run's left there to its own learner, which refuses it."""
    shared = [load_config(overrides=["spool.dir=/disk", f"run.name={name}"]).spool_directory for name in "ab"]
    assert [str(path) for path in shared] == ["/disk/a", "/disk/b"]
    own = [load_config(overrides=[f"run.name={name}"]).spool_directory for name in "ab"]
    assert own[0] != own[1]


def test_each_layer_wins_over_the_one_below() -> None:
    beneath = '[learner]\nlr = 1e-7\nsteps = 3\nwarmup_steps = 2\n[run]\nname = "preset"\nseed = 9\n'
    environ = {"ANABRANCH__LEARNER__LR": "1e-5", "ANABRANCH__RUN__NAME": "from-env", "PATH": "/bin"}
    config = load_config(TOML, beneath=beneath, environ=environ, overrides=["learner.lr=1e-4"])
    assert config.learner.lr == 1e-4
    assert config.run.name == "from-env"
    assert config.learner.steps == 7
    assert config.learner.warmup_steps == 2
    assert config.run.seed == 9


def test_the_last_of_two_overrides_wins() -> None:
    assert load_config(overrides=["run.seed=1", "run.seed=2"]).run.seed == 2


def test_values_are_toml_and_anything_else_is_text() -> None:
    config = load_config(
        overrides=[
            "learner.betas=[0.8, 0.9]",
            "learner.evaluate=false",
            "learner.keep_checkpoints=3",
            "run.name=plain-text",
            "task.prompt=What is {question}?",
            'task.system="quoted, with = and #"',
            "task.params={min_terms = 2, max_terms = 3}",
            "learner.deepspeed.zero_optimization.reduce_bucket_size=2",
            "model.path=some where/else",
        ]
    )
    assert config.learner.betas == (0.8, 0.9)
    assert config.learner.evaluate is False
    assert config.run.name == "plain-text"
    assert config.task.prompt == "What is {question}?"
    assert config.task.system == "quoted, with = and #"
    assert config.task.params == {"min_terms": 2, "max_terms": 3}
    assert config.learner.deepspeed == {"zero_optimization": {"reduce_bucket_size": 2}}
    assert str(config.model.path) == "some where/else"


def test_regions_come_from_any_layer() -> None:
    config = load_config(
        '[regions.east]\nurl = "redis://e:1/0"\n',
        environ={"ANABRANCH__REGIONS__WEST__URL": "redis://w:1/0"},
        overrides=["regions.north-1.url=redis://n:1/0"],
    )
    assert sorted(config.regions) == ["east", "north-1", "west"], "naming any replaces the default region"


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("learner.lrr=1", "learner.lr?"),
        ("lerner.lr=1", "learner?"),
        ("sampling.tempreature=1.0", "sampling.temperature?"),
        ("regions.east.uri=redis://h:1", "regions.east.url?"),
        ("correction.max_policy_age=1", "correction.max_age?"),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(override: str, near: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config(overrides=[override])
    assert f"did you mean {near}" in str(caught.value)
    assert override.partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_unlike_any_other_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"known: bytes_per_file, merge_bytes, .*rows_per_file, seconds_per_file"):
        load_config(overrides=["recorder.zzz=1"])


@pytest.mark.parametrize(
    ("layers", "where"),
    [
        ({"environ": {"ANABRANCH__LEARNER__STEPS": "many"}}, "environment variable ANABRANCH__LEARNER__STEPS"),
        ({"overrides": ["learner.steps=many"]}, "--set learner.steps"),
        ({"environ": {"ANABRANCH__LEARNER__STEP": "1"}}, "environment variable ANABRANCH__LEARNER__STEP"),
        ({"overrides": ["learner=5"]}, "--set learner"),
    ],
)
def test_a_mistake_says_where_it_was_made(layers: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(**layers)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "learner.steps=many", "learner.steps=1.5", "learner.steps=true", 'learner.steps="5"', "learner.lr=fast",
        "learner.evaluate=1", 'learner.evaluate="yes"', "learner.lr=inf", "learner.lr=nan", "learner.zero_stage=4",
        "learner.betas=[0.9]", "learner.betas=0.9", "run.name=5", "run.name=../up", "run.name=", "run.seed=-1",
        "task.params=5", "producer.kv_policy=drop", "producer.dtype=int8", "learner=5", "regions=5", "hub=5",
        "stream.max_entry_bytes=1", "sampling.group_size=1", "channel.codec_threads=0", "task.params.x=inf",
    ],
)  # fmt: skip
def test_a_wrong_type_or_value_is_refused_and_named(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    assert override.split("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stream.block_ms=5000"], "block_ms = 5000 must be below socket_timeout_ms"),
        (["producer.max_model_len=100"], "exceeds producer.max_model_len = 100"),
        (["regions={}"], "regions is empty"),
        (["stream.max_entry_bytes=65536"], "can take 69632 bytes, more than stream.max_entry_bytes = 65536"),
        (["stream.max_entry_bytes=536870913"], "less than or equal to 536870912"),
        (
            ["stream.max_entry_bytes=62500001"],
            "62500000 bytes that 100 Mbit/s carry within stream.socket_timeout_ms = 5000",
        ),
        (["stream.socket_timeout_ms=1000"], "max_entry_bytes = 16777216 exceeds the 12500000 bytes"),
        (['regions."a b".url=redis://h:1'], "region name"),
        (["regions.øst.url=redis://h:1"], "region name"),
        (["hub.url=http://h:1"], "is not a redis://"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=overrides)


def test_the_largest_entries_go_with_a_time_out_that_carries_them() -> None:
    made = load_config(overrides=["stream.max_entry_bytes=536870912", "stream.socket_timeout_ms=43000"])
    assert made.stream.max_entry_bytes == 512 * 2**20


@pytest.mark.parametrize(
    "setting",
    ["top_p=0.9", "top_k=50", "min_p=0.1", "repetition_penalty=1.1", "presence_penalty=0.5", "frequency_penalty=-0.5"],
)
def test_sampling_that_falsifies_log_probs_is_refused(setting: str) -> None:
    with pytest.raises(UnsafeSamplingError, match=setting.split("=")[0]):
        load_config(overrides=[f"sampling.{setting}"])


def test_unsafe_sampling_among_other_mistakes_is_still_told() -> None:
    with pytest.raises(UnsafeSamplingError, match=r"learner\.lrr"):
        load_config(overrides=["sampling.top_p=0.5", "learner.lrr=1"])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"toml_text": "a = ", "source": "run.toml"}, "run.toml is not valid TOML"),
        ({"beneath": "a = "}, "the preset is not valid TOML"),
        ({"overrides": ["learner.lr"]}, "not of the form"),
        ({"overrides": ["=5"]}, "not of the form"),
        ({"overrides": ["learner.lr.x=5"], "toml_text": TOML}, "'lr' is a value, not a section"),
        ({"environ": {"ANABRANCH__RUN__NAME__X": "5"}, "toml_text": TOML}, "environment variable ANABRANCH__RUN__NAME__X"),
    ],
)  # fmt: skip
def test_unreadable_layers_are_named(layers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(**layers)


@pytest.mark.parametrize(
    "override",
    [
        "hub=redis://:s3cret@h:1",
        "hub.url=http://:s3cret@h:1",
        "hub.url=:s3cret@h:1",
        "hub.uri=redis://:s3cret@h:1",
        "hub.url=['redis://:s3cret@h:1']",
        "regions.east=redis://:s3cret@h:1",
        "redis://:s3cret@h:1",
        "learner.steps=redis://:s3cret@h:1",
    ],
)
def test_no_mistake_shows_a_password(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_dumps_mask_passwords_and_are_complete() -> None:
    config = load_config(
        overrides=["hub.url=redis://u:s3cret@h:1/0", "regions.east.url=rediss://:s3cret@e:2/1?password=s3cret"]
    )
    for text in (dump_toml(config), str(dump_json(config))):
        assert "s3cret" not in text
        assert "redis://u:***@h:1/0" in text
    tree = tomllib.loads(dump_toml(config))
    assert set(tree) == set(RunConfig.model_fields)
    assert set(tree["learner"]) >= {"lr", "steps", "betas", "checkpoint_every"}


_SCALARS = st.integers(-(2**60), 2**60) | st.booleans() | st.text(max_size=8) | st.floats(allow_nan=False, width=32)
_FREE = st.dictionaries(
    st.text(min_size=1, max_size=6),
    st.recursive(
        _SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@given(
    deepspeed=_FREE,
    params=st.dictionaries(st.text(max_size=6), st.integers() | st.booleans() | st.text(max_size=8), max_size=3),
    prompt=st.text(max_size=20),
    lr=st.floats(0, 1),
    target=st.none() | st.floats(-1, 1),
)
def test_a_dump_read_again_is_the_same_configuration(deepspeed, params, prompt, lr, target) -> None:
    tree = {
        "learner": {"deepspeed": deepspeed, "lr": lr, **({} if target is None else {"target_reward": target})},
        "task": {"params": params, "prompt": prompt},
        "run": {"dir": "a folder/runs"},
    }
    config = RunConfig.model_validate(tree)
    assert load_config(dump_toml(config)) == config


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def test_nothing_can_be_changed_once_it_is_valid() -> None:
    config = load_config()
    with pytest.raises(ValidationError):
        config.learner.lr = 1.0  # type: ignore[misc]


def test_durations_and_sizes_name_their_unit() -> None:
    """A key that ends like a duration or a size says in which unit it is."""
    vague = ("timeout", "deadline", "idle", "block", "poll", "lease", "interval", "size_limit", "memory", "cache")
    assert not [key for key, _ in _leaves(RunConfig) if key.endswith(vague)]


def test_a_files_task_params_replace_the_presets_as_a_whole() -> None:
    preset = '[task]\ndataset = "chain_sum"\nparams = { min_terms = 2 }\n'
    config = load_config('[task]\ndataset = "gcd"\nparams = { max_numbers = 3 }\n', beneath=preset)
    assert config.task.params == {"max_numbers": 3}
    assert load_config("", beneath=preset, overrides=["task.params.max_terms=4"]).task.params == {
        "min_terms": 2, "max_terms": 4,
    }  # fmt: skip
