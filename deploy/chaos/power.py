"""Loss of power: a server killed, and with it what it had acknowledged and not yet synced.

Invariant: what is cut off the append-only file was written within the last `LOST_S` before the kill, as with `appendfsync
everysec`; a process killed with SIGKILL alone loses none of it, since the kernel keeps what was written.
Held by tests/process/test_chaos.py.
"""

from __future__ import annotations

import os
import signal
import time

from anabranch.deploy.chaos.fault import Fault
from anabranch.deploy.chaos.lab import Lab
from anabranch.deploy.chaos.process_faults import Kill
from anabranch.deploy.child import ChildState

LOST_S = 1.0
_DEATH_S = 1.0


class PowerLoss(Kill):
    kind, weight, where = "region's Redis loses its last second", 7, "server"

    def inject(self, lab: Lab) -> bool:
        child = lab.children[self.plan.target]
        if (
            child.state is not ChildState.RUNNING
            or child.pid is None
            or not lab.answers(lab.place.site_of(self.plan.target))
        ):
            return False
        self._pid = child.pid
        died = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > died + _DEATH_S:
                return True  # still dying: the supervisor starts another before we could take anything away
            time.sleep(0.005)
        lab.log_sizes.cut(self.plan.target, since=died - LOST_S)
        return True


class HubPowerLoss(PowerLoss):
    kind, weight, where = "hub's Redis loses its last second", 4, "redis-hub"


KINDS: tuple[type[Fault], ...] = (PowerLoss, HubPowerLoss)
