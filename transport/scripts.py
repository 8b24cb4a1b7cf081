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


def _text(name: str) -> str:
    return (files("anabranch.transport") / "lua" / f"{name}.lua").read_text("utf-8")


class Scripts:
    """The scripts of one act family, over the same keys and with the same prelude. Usable from several threads."""

    def __init__(self, client: redis.Redis, keys: Sequence[str], *, prelude: str = "") -> None:
        self._client, self._keys, self._prelude = client, list(keys), prelude
        self._loaded: dict[str, Any] = {}

    def run(self, name: str, *args: Any) -> Any:
        return self._script(name)(keys=self._keys, args=args)

    def pipeline(self, name: str, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """The script once for each row of arguments, in order and in one round trip; the first error is raised after all
        have run. Runs all again after a server that did not know the script: a repetition must be harmless."""
        script = self._script(name)
        for last in (False, True):
            with self._client.pipeline(transaction=False) as pipe:
                for row in rows:
                    pipe.evalsha(script.sha, len(self._keys), *self._keys, *row)
                replies: list[Any] = pipe.execute(raise_on_error=False)
            errors = [reply for reply in replies if isinstance(reply, Exception)]
            if not errors:
                break
            if last or not isinstance(errors[0], exceptions.NoScriptError):
                raise errors[0]
            self._client.script_load(script.script)
        return replies

    def _script(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load(self._client, name, prelude=self._prelude)
        return self._loaded[name]
