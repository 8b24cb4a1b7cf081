"""An update as all workers of an in-process engine see it: staged by every one of them, or given up by all.

Invariant: nothing is written before every worker has staged the whole update, and one refusal is a refusal by all; after
it no worker holds anything of it. Held by tests/e2e/test_engine_digest.py and tests/e2e/test_engine_tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.producers.checkpoint import first_difference
from anabranch.producers.mirror import Mirror
from anabranch.producers.update_message import STAGING, UpdateMemory
from anabranch.schemas import errors
from anabranch.schemas.errors import AnabranchError, ModelMismatchError
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion

Changed = Mapping[str, NDArray[np.int64] | None]  # tensor -> flat indices [K], or None for all of it


@dataclass(frozen=True, slots=True)
class Update:
    """An update on its way: what was asked for, what the workers were told, and how much it writes."""

    mirror: Mirror
    policy: PolicyVersion
    changed: Changed
    message: dict[str, Any]
    elements: int
    tensors: int

    def is_of(self, mirror: Mirror, policy: PolicyVersion, changed: Changed) -> bool:
        return self.mirror is mirror and self.policy == policy and self.changed is changed


class WorkerUpdates:
    """`call` is the engine's `collective_rpc`: a method of AnabranchWorkerExtension and its arguments -> answers."""

    def __init__(self, call: Callable[..., list[Any]], layout: Layout) -> None:
        self._call, self._layout = call, layout
        self._memory = UpdateMemory()
        self._update: Update | None = None
        self._everything = True  # until a first update is written

    def begin(self, mirror: Mirror, policy: PolicyVersion, changed: Changed) -> Update:
        """Have the workers stage this update in the background, unless it is the one that they stage already. The first
        one is of every tensor, whatever `changed` says.

        Raises ModelMismatchError if the mirror has another layout, or what a worker refuses it for.
        """
        if self._update is not None:
            if self._update.is_of(mirror, policy, changed):
                return self._update
            self.give_up()
        if mirror.layout.hash != self._layout.hash:
            raise ModelMismatchError(first_difference(self._layout, mirror.layout))
        places: Changed = dict.fromkeys(self._layout.by_name) if self._everything else changed
        if unknown := next((name for name in places if name not in self._layout.by_name), None):
            raise ModelMismatchError(f"the update changes {unknown!r}, which the layout lacks")
        elements = sum(self._layout.by_name[n].numel if i is None else len(i) for n, i in places.items())
        message = self._memory.message(mirror, places)
        self._update = Update(mirror, policy, changed, message, elements, len(places))
        self._ask_all("anabranch_stage", update_info=message, background=True)
        return self._update

    def staged(self, *, wait: bool) -> bool:
        """Whether every worker has staged the update. Raises what one refuses it for."""
        return self._ask_all("anabranch_staged", wait=wait)

    def write(self) -> None:
        """Write the staged update into the live weights. Whatever this raises, some may be written."""
        assert self._update is not None, "write without begin"
        message, self._update = self._update.message, None
        self.ask("start_weight_update")
        self.ask("update_weights", update_info=message)
        self.ask("finish_weight_update")
        self._everything = False

    def give_up(self) -> None:
        self._update = None
        self.ask("anabranch_cancel")

    def ask(self, method: str, **kwargs: object) -> bool:
        """Call `method` on every worker; False if one is still staging. Raises the first refusal."""
        answers = self._call(method, kwargs=kwargs)
        for answer in answers:
            if answer is not None and answer != STAGING:
                raise getattr(errors, answer[0])(answer[1])
        return STAGING not in answers

    def close(self) -> None:
        self._memory.close()

    def _ask_all(self, method: str, **kwargs: object) -> bool:
        try:
            return self.ask(method, **kwargs)
        except AnabranchError:  # others may have staged it
            self.give_up()
            raise
