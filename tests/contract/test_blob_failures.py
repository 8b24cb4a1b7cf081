"""A blob store that is away, silent, full, forbidden or not there: a named error within its deadline, without secrets."""

from __future__ import annotations

import errno
import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from redis import exceptions
from structlog.testing import capture_logs

from anabranch.schemas.errors import BackpressureError, ConfigError, DeltaError, StreamUnavailableError
from anabranch.transport import blob_files
from anabranch.transport.object_blob_store import ObjectBlobStore
from anabranch.transport.outage import Outage
from anabranch.transport.redis_blob_store import RedisBlobStore

SECRET = "s3cret-of-the-store"
KEY_ID = "AKIATESTKEYID"


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def bucket(port: int, **more) -> ObjectBlobStore:
    options = {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "allow_http": "true"}
    return ObjectBlobStore("s3://weights/models", "r", options=options, **more)


def every_call(store: ObjectBlobStore):
    return [
        lambda: store.put(b"x"),
        lambda: store.get("f" * 64, 1),
        lambda: store.delete(["f" * 64]),
        lambda: list(store.list()),
    ]


def check_message(error: Exception) -> None:
    text = str(error)
    assert "the blob store s3://weights/models" in text
    assert SECRET not in text
    assert KEY_ID not in text
    assert "\n" not in text
    assert len(text) < 800
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_a_port_where_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for call in every_call(bucket(free.getsockname()[1], deadline_s=1.5)):
            started = time.monotonic()
            with pytest.raises(StreamUnavailableError, match="does not answer as it should") as caught:
                call()
            assert time.monotonic() - started < 15
            check_message(caught.value)


def test_a_server_that_accepts_and_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        for call in every_call(bucket(server.getsockname()[1], deadline_s=1.2)):
            started = time.monotonic()
            with pytest.raises(StreamUnavailableError, match="does not answer as it should") as caught:
                call()
            assert time.monotonic() - started < 15
            check_message(caught.value)


def test_an_outage_is_told_long_before_the_publisher_gives_up():
    with socket.socket() as free, capture_logs() as logged:
        free.bind(("127.0.0.1", 0))
        store = bucket(free.getsockname()[1], deadline_s=1)
        store._outage = Outage(after_s=0)
        for _ in range(3):
            with pytest.raises(StreamUnavailableError):
                store.put(b"x")
    (line,) = logged
    assert line["event"].startswith("chunks cannot be stored")
    assert "the blob store s3://weights/models does not answer as it should" in line["error"]
    assert SECRET not in str(line)


def test_a_redis_that_is_full_is_told_too(client, keys, monkeypatch):
    store = RedisBlobStore(client, keys)
    store._outage = Outage(after_s=0)

    def full(*args, **more):
        raise exceptions.OutOfMemoryError("OOM command not allowed")

    with capture_logs() as logged:
        with monkeypatch.context() as patch:
            patch.setattr(client, "set", full)
            for _ in range(3):
                with pytest.raises(BackpressureError):
                    store.put(b"x")
        store.put(b"x")
    assert [line["event"].partition(";")[0] for line in logged] == [
        "chunks cannot be stored", "chunks can be stored again",
    ]  # fmt: skip


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers every request with the server's `status` and `code`, as S3 would."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append(self.command)
        body = (
            f'<?xml version="1.0"?><Error><Code>{self.server.code}</Code><Message>no</Message>'
            f"<AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId></Error>"
        ).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    server.daemon_threads = True
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.mark.parametrize(
    ("status", "code", "kind", "message"),
    [
        (403, "AccessDenied", ConfigError, "refused access"),
        (403, "InvalidAccessKeyId", ConfigError, "refused access"),
        (401, "Unauthorized", ConfigError, "refused access"),
        (404, "NoSuchBucket", ConfigError, "does not exist; make the bucket"),
        (500, "InternalError", StreamUnavailableError, "does not answer as it should"),
        (503, "SlowDown", StreamUnavailableError, "does not answer as it should"),
        (507, "InsufficientStorage", BackpressureError, "is full"),
    ],
)
def test_a_server_that_refuses(refusing, status, code, kind, message):
    refusing.status, refusing.code = status, code
    for call in every_call(bucket(refusing.server_address[1], deadline_s=1)):
        started = time.monotonic()
        with pytest.raises(kind, match=message) as caught:
            call()
        assert time.monotonic() - started < 15
        check_message(caught.value)
    assert len(refusing.seen) >= 4


def test_a_server_that_is_back_after_a_moment_is_asked_again(refusing):
    refusing.status, refusing.code = 503, "SlowDown"
    store = bucket(refusing.server_address[1], deadline_s=20)
    timer = threading.Timer(0.5, lambda: setattr(refusing, "status", 404) or setattr(refusing, "code", "NoSuchKey"))
    timer.start()
    with pytest.raises(DeltaError, match="is not in"):
        store.get("f" * 64, 1)
    timer.join()
    assert len(refusing.seen) > 1


def test_an_answer_that_is_cut_is_no_chunk(refusing):
    """The server promises more bytes than come."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    one, _ = server.accept()
                except OSError:
                    return
                with one:
                    one.recv(65536)
                    one.sendall(
                        b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\nETag: "a"\r\n'
                        b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\nonly this"
                    )

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        started = time.monotonic()
        with pytest.raises(StreamUnavailableError, match="does not answer as it should"):
            bucket(server.getsockname()[1], deadline_s=1).get("f" * 64, 100)
        assert time.monotonic() - started < 15
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.ENOSPC, BackpressureError, "is full .*give it more space, or lower channel.retain_bytes"),
        (errno.EDQUOT, BackpressureError, "is full"),
        (errno.EACCES, ConfigError, "refused access"),
        (errno.EROFS, ConfigError, "refused access"),
        (errno.EIO, StreamUnavailableError, "does not answer as it should"),
    ],
)
def test_a_disk_that_fails(tmp_path, monkeypatch, number, kind, message):
    store = ObjectBlobStore(f"file://{tmp_path}", "r")
    store.put(b"before")

    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(blob_files.os, "fsync", fail)
        with pytest.raises(kind, match=message):
            store.put(b"weights")
    assert len(list(store.list())) == 1
    assert list((tmp_path / "r" / "aside").iterdir()) == []
