from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from anabranch.schemas.errors import ConfigError
from anabranch.transport.log import log_level, setup_logging
from anabranch.transport.redact import redact_text, redact_value


@pytest.fixture(autouse=True)
def _structlog_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(out: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_one_json_object_a_line_with_service_and_region():
    out = io.StringIO()
    setup_logging("producer", region="eu", stream=out)
    structlog.get_logger().info("swap", version=3, digest=None)
    (line,) = logged(out)
    assert line["timestamp"].endswith("Z")
    del line["timestamp"]
    assert line == {
        "service": "producer", "region": "eu", "event": "swap", "version": 3, "digest": None, "level": "info"
    }  # fmt: skip


def test_a_person_gets_text():
    out = Terminal()
    setup_logging("learner", stream=out)
    structlog.get_logger().warning("slow step", seconds=4)
    assert "slow step" in out.getvalue()
    assert not out.getvalue().startswith("{")


def test_events_below_the_level_are_left_out():
    out = io.StringIO()
    setup_logging("learner", level="warning", stream=out)
    structlog.get_logger().info("chatter")
    structlog.get_logger().error("trouble")
    assert [line["event"] for line in logged(out)] == ["trouble"]


def test_the_level_comes_from_the_environment_and_is_checked():
    assert log_level({}) == "info"
    assert log_level({"ANABRANCH_LOG_LEVEL": "DEBUG"}) == "debug"
    with pytest.raises(ConfigError, match="loud"):
        log_level({"ANABRANCH_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match="loud"):
        setup_logging("x", level="loud")


def test_passwords_are_hidden_in_every_value_and_in_tracebacks():
    out = io.StringIO()
    setup_logging("learner", stream=out)
    url = "redis://app:hunter2@hub:6379/0"
    try:
        raise RuntimeError(f"cannot reach {url}")
    except RuntimeError as error:
        structlog.get_logger().error(
            f"lost {url}", url=url, nested={"regions": [url, (url,)]}, error=error, exc_info=sys.exc_info()
        )
    assert "hunter2" not in out.getvalue()
    (line,) = logged(out)
    assert line["nested"]["regions"] == ["redis://app:***@hub:6379/0", ["redis://app:***@hub:6379/0"]]
    assert "RuntimeError: cannot reach redis://app:***@hub:6379/0" in line["exception"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:s3cret@h:1/0", "redis://:***@h:1/0"),
        ("a rediss://u:p@ss@h/0 and unix://u:x@/run/r.sock!", "a rediss://u:***@h/0 and unix://u:***@/run/r.sock!"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("at redis://u:s3c/ret@h:1/0 since", "at redis://u:***@h:1/0 since"),
        ("redis://h:1/0?password=s3cret&db=1 is away", "redis://h:1/0?password=***&db=1 is away"),
        ("rediss://h?db=1&Password=s3/c@ret", "rediss://h?db=1&Password=***"),
        ("http://h/a:b@c", "http://h/a:b@c"),
        ("mail me: a:b@c.d", "mail me: a:b@c.d"),
    ],
)
def test_only_passwords_of_urls_are_replaced(text, shown):
    assert redact_text(text) == shown


SECRET = st.text(st.characters(codec="ascii", exclude_characters=" \t\r\n\x0b\x0c\x1c\x1d\x1e\x1f*"), min_size=6)


@given(before=st.text(), secret=SECRET, after=st.text())
def test_no_secret_survives_wherever_it_stands(before, secret, after):
    text = f"{before} redis://user:{secret}@host:1/0 {after}"
    if secret not in f"{before} redis://user:***@host:1/0 {after}":
        assert secret not in redact_text(text)


def test_values_keep_their_shape():
    assert redact_value({"a": [1, 2.5, None, True], "b": b"x"}) == {"a": [1, 2.5, None, True], "b": "b'x'"}


def test_a_full_disk_under_the_log_does_not_stop_the_service():
    out = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closing it fails, as it should
    setup_logging("recorder", stream=out)
    for _ in range(3):
        structlog.get_logger().warning("recording paused", error="no space left")
    with pytest.raises(OSError, match="No space"):
        out.close()
