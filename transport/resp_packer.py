"""Commands as the bytes that a Redis reads.

Invariant: the bytes are those that redis-py's own packer in Python makes, and large values are handed on as they are, without a
copy (redis-py's other packer, that of hiredis, copies every one of them twice). An append has some thirty small arguments to
an entry: packing them took most of a sender's time. Held by tests/unit/transport/test_resp_packer.py.
"""

from __future__ import annotations

from typing import Any

from redis.connection import Encoder

LARGE = 6_000  # bytes, as redis-py has it: from here on a write of its own is less work than a copy
_ENCODE = Encoder("utf-8", "strict", False).encode


class RespPacker:
    """What a redis client takes as its `command_packer`."""

    def pack(self, *args: Any) -> list[bytes | memoryview]:
        """The command `args`, in pieces: the first argument's words, such as of "XGROUP CREATE", are arguments each.

        Raises redis.exceptions.DataError: an argument that is no text, bytes or number.
        """
        words = (args[0].encode() if isinstance(args[0], str) else args[0]).split()
        done: list[bytes | memoryview] = []
        pieces = [b"*%d\r\n" % (len(words) + len(args) - 1)]
        for arg in (*words, *args[1:]):
            kind = type(arg)
            data = (
                arg.encode() if kind is str else arg if kind is bytes else b"%d" % arg if kind is int else _ENCODE(arg)
            )
            size = len(data)
            if size > LARGE or isinstance(data, memoryview):
                pieces.append(b"$%d\r\n" % size)
                done += [b"".join(pieces), data]
                pieces = [b"\r\n"]
            else:
                pieces.append(b"$%d\r\n%b\r\n" % (size, data))
        done.append(b"".join(pieces))
        return done
