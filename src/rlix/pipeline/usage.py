"""How much of the pool a job has used, by the log of its leases."""


class Usage:
    """GPU-seconds under leases. Times are seconds of one clock, whichever."""

    def __init__(self, now: float) -> None:
        self._held: dict[int, int] = {}  # devices by epoch
        self._devices = 0  # of all of them
        self._used_gpu_s = 0.0  # until `_since`
        self._since = now

    def granted(self, epoch: int, devices: int, now: float) -> None:
        self._held[epoch] = devices
        self._change(devices, now)

    def released(self, epoch: int, devices: int, now: float) -> None:
        """So many devices of a lease, or all; one that never became active has used nothing."""
        held = self._held.pop(epoch, 0)
        if held > devices:
            self._held[epoch] = held - devices
        self._change(-min(held, devices), now)

    def _change(self, devices: int, now: float) -> None:
        self._used_gpu_s, self._since = self.gpu_s(now), now
        self._devices += devices

    def gpu_s(self, now: float) -> float:
        return self._used_gpu_s + self._devices * (now - self._since)
