"""A Redis that cannot be used: a deadline, an error that names it, and no password in it."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import redis

from anabranch.schemas.config import StreamSection
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import AnabranchError, ConfigError, StreamUnavailableError
from anabranch.schemas.keys import Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey, server_binary
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.retry import wait_until
from tests import servers
from tests.contract.backends import SERVERS


def test_a_port_where_nobody_listens(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else gets the port
        port = sock.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(StreamUnavailableError) as caught:
            connect(f"redis://app:hunter2@127.0.0.1:{port}/0", deadline_s=0.5, what="the Redis of region eu")
        assert 0.4 < time.monotonic() - start < 20
    message = str(caught.value)
    assert f"redis://app:***@127.0.0.1:{port}/0" in message
    assert "the Redis of region eu" in message
    assert "within 0.5 s" in message
    assert "check that it runs" in message
    assert "hunter2" not in message + repr(caught.value.__cause__)
    assert caught.value.exit_code == 75


def test_a_server_that_accepts_and_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        start = time.monotonic()
        with pytest.raises(StreamUnavailableError, match=r"within 0\.3 s"):
            connect(
                f"redis://127.0.0.1:{server.getsockname()[1]}/0",
                stream=StreamSection(socket_timeout_ms=300, block_ms=100),
                deadline_s=0.3,
                what="the hub",
            )
        assert time.monotonic() - start < 20


def test_a_wrong_password_needs_a_person_and_is_not_waited_for(valkey):
    start = time.monotonic()
    with pytest.raises(ConfigError, match="refused the credentials") as caught:
        connect(f"redis://:wrong-one@127.0.0.1:{valkey.port}/0", deadline_s=30, what="the hub")
    assert time.monotonic() - start < 20
    assert "wrong-one" not in str(caught.value)
    assert caught.value.exit_code == 78
    with pytest.raises(ConfigError, match="refused the credentials"):
        connect(f"redis://127.0.0.1:{valkey.port}/0", deadline_s=30, what="the hub")


@pytest.mark.parametrize("url", ["redis://h:hunter2@host:notaport/0", "http://h:hunter2@host/0"])
def test_an_unusable_url_is_a_configuration_error(url):
    with pytest.raises(ConfigError, match="not a usable Redis URL") as caught:
        connect(url, deadline_s=1, what="the hub")
    assert "hunter2" not in str(caught.value)


def test_a_server_that_goes_away_is_named_in_the_error(tmp_path):
    with EmbeddedValkey(tmp_path / "v", password="hunter2") as server:
        client = connect(server.url, deadline_s=10, what="the hub")
        stream, permits = RedisStream(client, Keys("r"), what="the Redis of region eu"), RedisPermits(client, Keys("r"))
        server.kill()
        for call in (
            lambda: stream.append([Envelope("p", 0, 0, b"x")], floor=0),
            lambda: stream.read("learner", "c", max_entries=1, block_ms=10),
            lambda: permits.take("p", max_groups=1, lease_ms=1000),
        ):
            start = time.monotonic()
            with pytest.raises(
                StreamUnavailableError, match=rf"redis://:\*\*\*@127\.0\.0\.1:{server.port}/0"
            ) as caught:
                call()
            assert time.monotonic() - start < 20
            assert "hunter2" not in str(caught.value)
        client.close()


def test_a_server_that_refuses_a_command_is_an_error_of_ours(client, keys):
    client.set(keys.trajectories, "not a stream")
    with pytest.raises(AnabranchError, match="refused a command"):
        RedisStream(client, keys).append([Envelope("p", 0, 0, b"x")], floor=0)


@pytest.mark.parametrize("server_name", SERVERS)
def test_a_server_that_is_busy_with_a_script_is_waited_for(tmp_path, server_name):
    """It answers BUSY after five seconds, here after one millisecond: no reason for a process to end."""
    program = server_binary() if server_name == "valkey" else servers.debian_redis(tmp_path)
    with EmbeddedValkey(tmp_path / "v", fsync="everysec", program=program) as server:
        client, other = (connect(server.url, deadline_s=10, what="the region") for _ in range(2))
        client.config_set("lua-time-limit", 1)
        stream = RedisStream(client, Keys("r"))
        assert stream.append([Envelope("p", 0, 0, b"x")], floor=0) == 1
        busy = threading.Thread(target=run_until_killed, args=(other,))
        busy.start()
        wait_until(lambda: is_busy(client), deadline_s=20, what="the script to run")
        with pytest.raises(StreamUnavailableError, match="BUSY"):
            stream.append([Envelope("p", 1, 1, b"x")], floor=0)
        end = threading.Timer(0.3, client.script_kill)
        end.start()
        assert stream.progress("p").next_seq == 1
        end.join()
        busy.join(10)
        assert stream.append([Envelope("p", 1, 1, b"x")], floor=0) == 2
        client.close()
        other.close()


def run_until_killed(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        client.eval("while true do end", 0)


def is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    return False
