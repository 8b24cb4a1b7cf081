"""The Lua scripts of transport/lua, one file each: the acts that must be atomic on the server.

Invariant: a script's writes happen together or not at all. A server out of memory refuses the first write of a script
and, once one was made, lets the rest pass: so each script makes its refusable write first.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import redis


def load(client: redis.Redis, name: str) -> Any:
    """The script transport/lua/`name`.lua as a callable(keys=[...], args=[...]); sent to the server by digest and again
    in full when a restart has made the server forget it."""
    return client.register_script((files("anabranch.transport") / "lua" / f"{name}.lua").read_text("utf-8"))
