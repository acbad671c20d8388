"""What a flow's job holds of the pool during a step: the devices on which its segment still works, and no others."""

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Self

from ray.exceptions import RayError

from rlix.control.client import JobClient
from rlix.protocol.errors import RlixError, StaleEpochError
from rlix.protocol.messages import Fence, Lease
from rlix.protocol.types import Phase
from rlix.workers.locks.lock import DeviceLock

logger = logging.getLogger(__name__)


class StepLease:
    """Between two segments others have their turn. A context manager; what it holds at the end it gives back.

    That costs a round trip between two segments and no load: a part belongs to one segment, and leaves after it anyway.
    A rank that has not gone at the end is ended.
    `lock`: of the parts, which are brought off before anything is given back.
    """

    def __init__(self, client: JobClient, cluster: str, lock: DeviceLock) -> None:
        self._client, self._cluster, self._lock = client, cluster, lock
        self._held: tuple[Lease, ...] = ()
        self._leaving = threading.Lock()  # stages end in threads of their own

    def change(self, devices: Sequence[int], phase: Phase) -> Fence | None:
        """Give back what is held, and wait for these devices, as long as it takes, in the queue of this phase.

        Raises what `JobClient.acquire` raises, and what a part that does not go raised.
        """
        self._lock.clear()
        if not devices:
            self.end()
            return None
        lease = self._client.acquire(self._cluster, phase, devices=devices, giving=self._held)
        self._held = (lease,)
        return self._client.fence(lease)

    def add(self, devices: Sequence[int], phase: Phase, stop: threading.Event) -> Lease:
        """Within a segment that holds nothing: wait for these devices. Raises what `JobClient.acquire` raises."""
        lease = self._client.acquire(self._cluster, phase, devices=devices, stop=stop)
        self._held = (lease,)
        return lease

    def leave(self, names: Collection[str], devices: Sequence[int]) -> None:
        """Within a segment: give back the devices of these parts, which have done their work, while others go on.

        Raises what `JobClient.give_back` raises, and what a part that does not go raised.
        """
        self._lock.clear(names)
        with self._leaving:
            (lease,) = self._held
            if set(lease.devices) <= set(devices):  # those that go on need no device
                self.end()
            else:
                self._held = (self._client.give_back(lease, devices),)

    def end(self) -> None:
        """Give back what is held, when no byte is there any more."""
        held, self._held = self._held, ()
        if held:
            self._client.release(*held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            try:
                self._lock.clear()
            except BaseException:  # raised again; it is what a part raised, or Ctrl-C
                self._lock.end()  # or the pool, which finds these devices locked, would end all workers of the job
                raise
            finally:
                self.end()
        except (RlixError, RayError) as error:
            if kind is None:
                raise
            if not isinstance(error, StaleEpochError):  # it was given back already, or is gone with the job
                logger.warning("%s: devices were not given back: %s", self._cluster, error)
