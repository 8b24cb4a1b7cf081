"""A server whose disk was full once does not start again; its file is mended, and nothing that it had taken is missing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import redis

from anabranch.cli.main import main
from anabranch.schemas.errors import TemporaryError
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.retry import wait_until
from tests.spools import small_disk


def pushed(client: redis.Redis, value: str) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.rpush("list", value))
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_hole_after_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", 4 * 2**20) as disk:
        server = EmbeddedValkey(disk / "redis", fsync="everysec")
        server.start()
        client = connect(server.url, deadline_s=10, what="the test server")
        client.bgrewriteaof()  # the file it goes on with is opened without O_APPEND
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], deadline_s=10, what="the rewrite")
        client.rpush("list", "before")  # its page has room for a part of the next entry
        taken = 0
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        with contextlib.suppress(redis.RedisError):
            while True:
                client.rpush("list", f"{taken:<5000}")
                taken += 1
        filler.unlink()
        wait_until(lambda: pushed(client, "after"), deadline_s=10, what="the server to take writes again")
        held = client.lrange("list", 0, -1)
        assert len(held) >= taken + 2
        server.kill()
        client.close()

        (log,) = (disk / "redis" / "appendonlydir").glob("*.incr.aof")
        with pytest.raises(TemporaryError, match="Bad file format"):
            server.start()
        assert main(["stream", "mend-aof", "--dry-run", str(log)]) == 0
        assert "would be dropped" in capsys.readouterr().out
        assert main(["stream", "mend-aof", str(log)]) == 0
        assert "no command is lost" in capsys.readouterr().out
        server.start()
        client = connect(server.url, deadline_s=10, what="the test server")
        assert client.lrange("list", 0, -1) == held
        client.close()
        server.stop()
