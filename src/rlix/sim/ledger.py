"""What every GPU did, second by second: the run's GPU-seconds by use always add up to the pool's."""

from collections.abc import Iterable
from enum import IntEnum


class Use(IntEnum):
    """What a GPU does. Only GANG and DECODE are work; LOAD and DRAIN are the price of switching."""

    FREE = 0
    PARKED = 1  # holds a bundle whose rollout needs nothing now
    LOAD = 2
    DECODE = 3
    DRAIN = 4  # gives memory back, or waits for others of its gang that do
    GANG = 5


_IDLE = (Use.FREE, Use.PARKED)


class Ledger:
    """Integrates the number of GPUs in each use over virtual time."""

    def __init__(self, gpus: int, *, keep_series: bool = False) -> None:
        self.gpus = gpus
        self.now = 0.0
        self.gpu_s = [0.0] * len(Use)
        self.demand_s = 0.0  # time during which some job had rollout work
        self.idle_gpu_s = 0.0  # free or parked GPUs during that time
        self.surplus_gpu_s = 0.0  # those of them that no rollout could have used
        self.demanding = 0  # jobs that have rollout work now
        self.series: list[tuple[float, tuple[int, ...]]] = []
        self._use = [Use.FREE] * gpus
        self._count = [gpus] + [0] * (len(Use) - 1)
        self._keep = keep_series

    @property
    def idle(self) -> int:
        return sum(self._count[use] for use in _IDLE)

    def advance(self, now: float, wanted: int = 0) -> None:
        """`wanted`: how many GPUs more the rollouts could have used."""
        elapsed = now - self.now
        if elapsed <= 0.0:
            return
        for use, count in enumerate(self._count):
            self.gpu_s[use] += count * elapsed
        if self.demanding:
            self.demand_s += elapsed
            idle = self.idle
            self.idle_gpu_s += elapsed * idle
            self.surplus_gpu_s += elapsed * max(0, idle - wanted)
        if self._keep:
            self.series.append((self.now, tuple(self._count)))
        self.now = now

    def put(self, devices: Iterable[int], use: Use) -> None:
        for device in devices:
            self._count[self._use[device]] -= 1
            self._use[device] = use
            self._count[use] += 1
