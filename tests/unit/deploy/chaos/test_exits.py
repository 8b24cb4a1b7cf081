from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from anabranch.deploy.chaos.exits import Exits


def child(**changes: Any) -> Any:
    base = {"spec": SimpleNamespace(name="learner"), "restarts": 0, "alive": True, "exit_code": None, "last_exit": ""}
    return SimpleNamespace(**(base | changes))


def test_each_end_is_noted_once() -> None:
    exits = Exits()
    killed = child(alive=False, exit_code=-9, last_exit="killed by SIGKILL")
    for state in (child(), killed, killed, child(restarts=1, exit_code=-9, last_exit="killed by SIGKILL")):
        exits.look([state])
    again = child(restarts=1, alive=False, exit_code=75, last_exit="exit 75 (temporary)")
    exits.look([again])
    exits.look([again])
    assert exits.codes == {"learner": [-9, 75]}
    assert exits.noted == {("learner", "killed by SIGKILL"): 1, ("learner", "exit 75 (temporary)"): 1}


def test_an_end_is_noted_although_the_next_start_ended_before_anybody_looked() -> None:
    exits = Exits()
    exits.look([child(alive=False, exit_code=75, last_exit="exit 75 (temporary)")])
    exits.look([child(restarts=1, alive=False, exit_code=75, last_exit="exit 75 (temporary)")])
    assert exits.codes == {"learner": [75, 75]}


def test_nothing_before_the_first_end() -> None:
    exits = Exits()
    exits.look([child(), child(spec=SimpleNamespace(name="recorder"))])
    assert exits.codes == {}
