"""How much of the pool a pipeline has used."""


class Usage:
    """GPU-seconds under leases, of one pipeline. Times are seconds of one clock, whichever."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._ended_gpu_s = 0.0
        self._held: dict[int, tuple[int, float]] = {}  # by epoch: devices and since when

    def granted(self, epoch: int, devices: int, now: float) -> None:
        self._held[epoch] = devices, now

    def released(self, epoch: int, now: float) -> None:
        """A lease that never became active has used nothing."""
        devices, since = self._held.pop(epoch, (0, now))
        self._ended_gpu_s += devices * (now - since)

    def gpu_s(self, now: float) -> float:
        return self._ended_gpu_s + sum(devices * (now - since) for devices, since in self._held.values())

    def age_s(self, now: float) -> float:
        return now - self._started
