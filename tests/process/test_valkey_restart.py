"""The embedded Valkey under kill -9: of itself, and of the process that started it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import ConfigError, TemporaryError
from anabranch.schemas.keys import Keys
from anabranch.schemas.layout import Layout
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_permits import RedisPermits
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.stream import ProducerProgress
from tests.streams import put

pytestmark = pytest.mark.process


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pid: int) -> None:
    end = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.02)


def test_everything_acknowledged_survives_kill_9(tmp_path):
    with EmbeddedValkey(tmp_path / "a place with spaces") as server:
        url = server.url
        client = connect(url, deadline_s=10, what="the hub")
        stream, permits = RedisStream(client, Keys("r")), RedisPermits(client, Keys("r"))
        channel = RedisWeightChannel(client, Keys("r"))
        put(stream, *(Envelope("p", seq, seq, bytes(1000)) for seq in range(40)))
        got = stream.read("learner", "c", max_entries=20, block_ms=0)
        stream.settle("learner", [(d.entry_id, "trained") for d in got[:10]])
        stream.trim()
        permits.reset(epoch=channel.open_epoch(), version=0, batch=8, max_age=1, total=100, accepted=())
        permits.take("p", max_groups=5, lease_ms=600_000)
        blob = channel.blobs.put(b"weights" * 1000)
        layout = Layout.build([("w", "bf16", (2, 2))])
        channel.put_layout(layout)
        before = stream.ledger("learner")

        server.kill()
        server.start()

        assert server.url == url, "same port, same password"
        after = stream.ledger("learner")  # the client reconnects by itself, scripts are loaded again
        assert after == before
        assert (after.produced, after.pending, after.fates) == (40, 30, {"trained": 10})
        assert stream.append([Envelope("p", 39, 39, b"again")], floor=0) == 40
        assert stream.progress("p") == ProducerProgress(next_seq=40, lowest_open=10)
        pending = stream.read_own_pending("learner", "c", max_entries=100)
        assert [d.entry_id for d in pending] == [d.entry_id for d in got[10:]]
        assert len(stream.read("learner", "c", max_entries=100, block_ms=0)) == 20
        assert [p.group_index for p in permits.take("q", max_groups=2, lease_ms=1000)] == [5, 6]
        assert channel.open_epoch() == 2
        assert channel.blobs.get(blob, 7000) == b"weights" * 1000
        assert channel.layout(layout.hash) == layout
        client.close()


def test_a_call_rides_out_a_restart(tmp_path):
    with EmbeddedValkey(tmp_path) as server:
        client = connect(server.url, deadline_s=10, what="the hub")
        stream = RedisStream(client, Keys("r"))
        put(stream, Envelope("p", 0, 0, b"x"))
        for _ in range(3):
            server.kill()
            server.start()
            assert stream.ledger("learner").produced == 1
        client.close()


def test_data_come_back_in_another_object_over_the_same_folder(tmp_path):
    with EmbeddedValkey(tmp_path) as server:
        client = connect(server.url, deadline_s=10, what="x")
        client.set("k", "v")
        client.close()
    assert not server.running
    with EmbeddedValkey(tmp_path, port=server.port, password=server.password) as again:
        client = connect(server.url, deadline_s=10, what="x")
        assert client.get("k") == b"v"
        assert again.running
        client.close()


def test_the_server_is_private(tmp_path):
    with EmbeddedValkey(tmp_path / "v") as server:
        config = tmp_path / "v" / "valkey.conf"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert stat.S_IMODE(config.parent.stat().st_mode) == 0o700
        for pid in (server.pid, os.getpid()):
            assert server.password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        client = connect(server.url, deadline_s=10, what="x")
        settings = client.config_get("*")
        assert settings["bind"] == "127.0.0.1"
        assert settings["maxmemory-policy"] == "noeviction"
        assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "always")
        client.close()


def test_stop_leaves_no_process(tmp_path):
    server = EmbeddedValkey(tmp_path).start()
    pid = server.pid
    server.stop()
    server.stop()
    assert gone(pid)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", server.port))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_dies_with_the_process_that_started_it(tmp_path, number):
    program = textwrap.dedent(f"""
        import time
        from anabranch.transport.embedded_valkey import EmbeddedValkey
        server = EmbeddedValkey({str(tmp_path)!r}).start()
        print(server.pid, flush=True)
        time.sleep(300)
    """)
    with subprocess.Popen([sys.executable, "-I", "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.send_signal(number)
        parent.wait(10)
        wait_gone(pid)


def test_a_taken_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            EmbeddedValkey(tmp_path, port=port).start()


def test_another_server_on_the_port_is_not_mistaken_for_ours(tmp_path):
    with EmbeddedValkey(tmp_path / "one", password="same") as one:
        two = EmbeddedValkey(tmp_path / "two", password="same", port=one.port)
        with pytest.raises(ConfigError, match="taken"):
            two.start()
        assert one.running
        assert not two.running


def test_a_lost_race_for_a_free_port_is_run_again(tmp_path, monkeypatch):
    from anabranch.transport import embedded_valkey

    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        real = embedded_valkey._free_port
        ports = iter([taken, taken])
        monkeypatch.setattr(embedded_valkey, "_free_port", lambda: next(ports, None) or real())
        with EmbeddedValkey(tmp_path) as server:
            assert server.port != taken


def test_a_server_that_cannot_start_says_why(tmp_path):
    with EmbeddedValkey(tmp_path) as server:
        client = connect(server.url, deadline_s=10, what="x")
        client.set("k", "v" * 1000)
        client.close()
    (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"this is not an append-only file\r\n" * 10)
    with pytest.raises(TemporaryError, match=r"ended at start: .*[Bb]ad file format"):
        EmbeddedValkey(tmp_path).start()


def test_two_servers_do_not_meet(tmp_path):
    with EmbeddedValkey(tmp_path / "eu") as eu, EmbeddedValkey(tmp_path / "us") as us:
        assert eu.port != us.port
        assert eu.password != us.password
        assert eu.url.startswith("redis://:")


def test_two_servers_over_one_folder_are_refused_and_the_first_goes_on(tmp_path):
    with EmbeddedValkey(tmp_path) as first:
        with pytest.raises(ConfigError, match="another server works in"):
            EmbeddedValkey(tmp_path).start()
        client = connect(first.url, deadline_s=10, what="x")
        assert client.ping()
        client.close()


def test_the_server_program_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ANABRANCH_REDIS_SERVER", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="missing, which is not a program"):
        EmbeddedValkey(tmp_path).start()
