"""Where the engines of a job's gangs are, and how they follow leases to other devices."""

import logging
import time
from collections.abc import Sequence
from typing import Any, TypedDict

from rlix.engine.declared import Deadlines, DeclaredSpeed
from rlix.engine.life_cycle import Residency
from rlix.pipeline.holdings import Resident
from rlix.protocol.errors import DeviceBusyError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, Fence, Registration

logger = logging.getLogger(__name__)

_NEWEST = 0.5  # what the newest move weighs in what a move is expected to take


class Asking(TypedDict, total=False):
    """What `JobClient.phase` is told of where a gang's state lies."""

    devices: tuple[int, ...]
    home: tuple[int, ...]
    move_s: float


class Places:
    """Of the clusters that may run elsewhere; the others are where they are. Of one job, on its main thread.

    Args:
        speed: what moves last at least.
    """

    def __init__(self, job: str, registration: Registration, speed: DeclaredSpeed) -> None:
        self.registration, self._job, self._speed = registration, job, speed
        self._moving = {c.name for c in registration.clusters if c.anywhere or c.alternatives}
        self._stays: set[str] = set()  # of those, after a move that failed
        self._move_s: dict[str, float] = {}
        self._waits = Deadlines()

    def asking(self, cluster: str, engine: Resident | None) -> Asking:
        """How to ask for the devices of a cluster whose engine this is."""
        if cluster not in self._moving:
            return {}
        here = tuple(device.id for device in getattr(engine, "devices", ()))
        if not here:
            return {}
        if cluster in self._stays:
            return {"devices": here}
        return {"home": here, "move_s": self._move_s.get(cluster, 0.0)}

    def bring(self, cluster: str, engine: Resident, lease: Fence, devices: Sequence[Device]) -> bool:
        """The engine onto the lease's devices.

        False: the workers there failed, and it is as it was, in host memory. So the lease is to be given back, and the
        cluster asks for the devices that it has from now on.
        """
        moving: Any = engine
        if cluster not in self._moving or getattr(moving, "devices", tuple(devices)) == tuple(devices):
            with self._waits.lasting(self._speed.move_s):
                engine.acquire(lease)
            return True
        begun = time.monotonic()
        try:
            with self._waits.lasting(self._speed.relocate_s + self._speed.move_s):
                moving.acquire(lease, devices)
        except (WorkerError, WaitTimeoutError, DeviceBusyError) as error:
            if moving.residency is not Residency.HOST:
                raise
            logger.warning("%s: %s stays where it is, for it could not move: %s", self._job, cluster, error)
            self._stays.add(cluster)
            return False
        took_s = time.monotonic() - begun
        expected_s = self._move_s.get(cluster, took_s)
        self._move_s[cluster] = expected_s + _NEWEST * (took_s - expected_s)
        return True

    def leave(self, engine: Resident, epoch: int) -> None:
        with self._waits.lasting(self._speed.move_s):
            engine.release(epoch)
