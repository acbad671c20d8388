"""A rollout's bundles, as the process sees it that uses them: they come and go while it works."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rlix.protocol.errors import DeviceBusyError, PipelineGoneError, StaleEpochError
from rlix.protocol.messages import Demand, Lease, RolloutAnswer

if TYPE_CHECKING:
    from rlix.control.client import JobClient

logger = logging.getLogger(__name__)

_POLL_S = 5.0
_STOP_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Granted:
    """Use these devices for one replica."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Taken:
    """Free these devices' memory and `give_back` the lease; after `deadline_s` seconds its processes are ended."""

    lease: Lease
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is over: its processes did not give it back in time, and were ended."""

    lease: Lease


Change = Granted | Taken | Lost


class Locks(Protocol):
    def take(self, lease: Lease) -> None: ...

    def drop(self, lease: Lease) -> None: ...


class RolloutLease:
    """The elastic lease of one cluster. One thread reads `changes`; the rest may be called from any.

    with job.rollout("actor_infer", demand=512) as rollout:
        for change in rollout.changes(stop):
            match change:
                case Granted(lease): ...   # load a replica on lease.devices
                case Taken(lease): ...     # free its memory, then rollout.give_back(lease)
                case Lost(lease): ...      # its processes were ended
        rollout.report(trajectories=17)    # what is still to do
    """

    def __init__(self, client: "JobClient", cluster: str, locks: "Locks | None" = None) -> None:
        """`locks`: takes and drops the device locks of each bundle, where this process keeps the bytes itself."""
        self._client = client
        self._locks = locks
        self.cluster = cluster
        self._lock = threading.Lock()
        self._held: dict[int, Lease] = {}
        self._draining: set[int] = set()  # asked back
        self._giving: set[int] = set()  # being given back right now

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The bundles that may be used now, in order of grant."""
        with self._lock:
            return tuple(lease for epoch, lease in sorted(self._held.items()) if epoch not in self._draining)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that may be used now, in order."""
        return tuple(sorted(device for lease in self.leases for device in lease.devices))

    def changes(self, stop: threading.Event | None = None) -> Iterator[Change]:
        """What happens to the bundles, as it happens; ends when `stop` is set or the pipeline ends."""
        wait_s = _POLL_S if stop is None else _STOP_POLL_S
        while stop is None or not stop.is_set():
            try:
                changes = self.poll(wait_s)
            except PipelineGoneError as error:
                logger.info("the rollout of %s ends: %s", self.cluster, error)
                return
            yield from changes

    def poll(self, wait_s: float = 0.0) -> list[Change]:
        """What has happened since the last call, waiting up to `wait_s` seconds for something to happen."""
        with self._lock:
            held, draining = tuple(self._held), tuple(self._draining)
        answer = self._client.poll_rollout(self.cluster, held, draining, wait_s)
        with self._lock:
            changes = self._take_up(answer)
        return [change for change in changes if self._usable(change)]

    def report(self, demand: Demand | int) -> None:
        """What is still to do; zero: nothing, and bundles go to whoever can use them."""
        self._client.report_demand(self.cluster, demand)

    def give_back(self, lease: Lease) -> None:
        """The devices' memory is free. Also for a lease that nobody asked back."""
        if self._locks is not None:
            self._locks.drop(lease)
        with self._lock:
            self._giving.add(lease.epoch)
        try:
            self._client.release(lease)
        except StaleEpochError:
            logger.info("lease %d of %s had ended already", lease.epoch, self.cluster)
        with self._lock:
            self._held.pop(lease.epoch, None)
            self._draining.discard(lease.epoch)
            self._giving.discard(lease.epoch)

    def _usable(self, change: Change) -> bool:
        """Takes the locks of a new bundle; one that somebody else uses goes back."""
        if self._locks is None or isinstance(change, Taken):
            return True
        if isinstance(change, Lost):
            self._locks.drop(change.lease)
            return True
        try:
            self._locks.take(change.lease)
        except DeviceBusyError as error:
            logger.error("%s", error)
            self.give_back(change.lease)
            return False
        return True

    def _take_up(self, answer: RolloutAnswer) -> list[Change]:
        changes: list[Change] = []
        for epoch in answer.lost:
            lease = self._held.pop(epoch, None)
            self._draining.discard(epoch)
            self._client.heartbeat.gave_back(epoch)
            if lease is not None and epoch not in self._giving:
                changes.append(Lost(lease))
        for lease in answer.granted:
            self._held[lease.epoch] = lease
            self._client.heartbeat.holds(lease.epoch)
            changes.append(Granted(lease))
        for lease, deadline_s in zip(answer.taken, answer.deadlines_s, strict=True):
            if lease.epoch in self._held and lease.epoch not in self._draining:
                self._draining.add(lease.epoch)
                changes.append(Taken(lease, deadline_s))
        return changes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is to be done any more; what is still held is given back."""
        with contextlib.suppress(PipelineGoneError):
            self.report(0)
            self.poll()  # takes up what was granted just before: nobody else would give it back
            for lease in [*self.leases, *(self._held[e] for e in sorted(self._draining) if e in self._held)]:
                self.give_back(lease)
