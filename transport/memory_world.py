"""Everything that regions and hub hold, in memory: a whole run inside one process, without a server.

Invariant: handles made by one world see one run, from any thread; what the parts promise is in their own modules.
Held by tests/unit/transport/test_memory_world.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from anabranch.transport.memory_boards import MemoryEvaluationBoard, MemoryRunBoard
from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore


class MemoryWorld:
    """One run over `regions`.

    Args:
        clock_ms: time of every part, in milliseconds; a test may set it.
    """

    def __init__(
        self,
        run: str = "run",
        regions: Iterable[str] = ("local",),
        *,
        clock_ms: Callable[[], float] = lambda: time.time() * 1000,
    ) -> None:
        self.run = run
        self.stores = {name: MemoryStreamStore(lambda: clock_ms() / 1000) for name in regions}
        self.weights = MemoryWeightStore(run, clock_ms=clock_ms)
        self.permits = MemoryPermits(run, clock_ms=clock_ms)
        self.runs = MemoryRunBoard(clock_ms=clock_ms)
        self.evaluations = MemoryEvaluationBoard(clock_ms=clock_ms)

    def stream(self, region: str = "local") -> MemoryStream:
        return MemoryStream(self.stores[region])

    def streams(self) -> dict[str, MemoryStream]:
        return {name: self.stream(name) for name in self.stores}

    def channel(self) -> MemoryWeightChannel:
        return MemoryWeightChannel(self.weights)
