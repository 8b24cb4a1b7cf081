"""The Lua scripts of transport/lua, one file each: the acts that must be atomic on the server.

Invariant: a script's writes happen together or not at all. Each begins with `#!lua`, so that a server which is out of
memory, or cannot write to its disk, refuses it as a whole before it has begun; with `#!lua flags=allow-oom`, which is for
those that make room or must not wait for it: they run to their end on a full server (one whose disk is full refuses them
too); or with `#!lua flags=no-writes`, which nothing but a server that is away keeps from running. Without that line a full
server would look at the first command that writes, and take all that comes after one it does not refuse.
Held by
tests/contract/test_full_server.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import redis
from redis import exceptions


def load(client: redis.Redis, name: str, *, prelude: str = "") -> Any:
    """The script transport/lua/`name`.lua as a callable(keys=[...], args=[...]); sent to the server by digest and again
    in full when a restart has made the server forget it. `prelude` names a file of functions that go before it."""
    head, _, body = _text(name).partition("\n")
    if prelude:
        body = f"{_text(prelude)}{body}"
    return client.register_script(f"{head}\n{body}")


def _reason(error: Exception) -> Exception:
    """Why a transaction was not run, where the server says so only there."""
    _, found, reason = str(error).partition("Transaction discarded because of: ")
    return exceptions.ResponseError(reason) if found else error


def _text(name: str) -> str:
    return (files("anabranch.transport") / "lua" / f"{name}.lua").read_text("utf-8")


class Scripts:
    """The scripts of one act family, over the same keys and with the same prelude. Usable from several threads."""

    def __init__(self, client: redis.Redis, keys: Sequence[str], *, prelude: str = "") -> None:
        self._client, self._keys, self._prelude = client, list(keys), prelude
        self._loaded: dict[str, Any] = {}

    def run(self, name: str, *args: Any) -> Any:
        return self._script(name)(keys=self._keys, args=args)

    def between(self, name: str, calls: Sequence[Sequence[Any]], commands: Sequence[Sequence[Any]]) -> list[Any]:
        """A transaction, in one round trip: the script with the first of `calls`, the first of `commands`, the script with
        the second, and so on; one call more than commands. Returns the script's replies.

        Raises redis's error, the first if there are several; a server that is full refuses the whole transaction.
        """
        script = self._script(name)
        with self._client.pipeline(transaction=False) as pipe:
            pipe.execute_command("MULTI")
            # The text, once: a server that did not know the digest would go on with the next command.
            pipe.execute_command("EVAL", script.script, len(self._keys), *self._keys, *calls[0])
            for command, call in zip(commands, calls[1:], strict=True):
                pipe.execute_command(*command)
                pipe.execute_command("EVALSHA", script.sha, len(self._keys), *self._keys, *call)
            pipe.execute_command("EXEC")
            *queued, done = pipe.execute(raise_on_error=False)
        replies: list[Any] = [] if isinstance(done, Exception) else done
        for reply in [*queued, *replies, done]:
            if isinstance(reply, Exception):
                raise _reason(reply)
        return replies[::2]

    def _script(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load(self._client, name, prelude=self._prelude)
        return self._loaded[name]
