"""A rollout's bundles, as the process sees it that uses them: they come and go while it works."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rlix.control.heartbeat import Heartbeat
from rlix.protocol.errors import DeviceBusyError, PipelineGoneError, RlixError, SpecError, StaleEpochError
from rlix.protocol.messages import MOST_SECONDS, MOST_WAIT_S, Demand, Lease, LeaseState, LeaseStatus, RolloutAnswer
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)

_POLL_S = 5.0
_STOP_POLL_S = 0.5
_LOCK_POLL_S = 0.1  # how often a bundle's devices are tried whose lock somebody has
LOCK_TIMEOUT_S = 10.0  # for whoever had the devices of a lease before to be gone


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
    def take(self, lease: Lease, timeout_s: float) -> None: ...

    def drop(self, lease: Lease) -> None: ...


class Asks(Protocol):
    """What a rollout asks of the control plane; see `rlix.control.client.JobClient`."""

    @property
    def heartbeat(self) -> Heartbeat: ...

    def poll_rollout(
        self, cluster: str, held: tuple[int, ...], draining: tuple[int, ...], wait_s: float
    ) -> RolloutAnswer: ...

    def report_demand(self, cluster: str, demand: Demand | int) -> None: ...

    def release(self, *leases: Lease) -> None: ...

    def leases(self) -> tuple[LeaseStatus, ...]: ...


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

    def __init__(
        self,
        client: Asks,
        cluster: str,
        locks: Locks | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`locks`: takes and drops the device locks of each bundle, where this process keeps the bytes itself."""
        self._client = client
        self._locks = locks
        self._clock = clock
        self.cluster = cluster
        self._lock = threading.Lock()
        self._held: dict[int, Lease] = {}
        self._unlocked: dict[int, float] = {}  # of these, whose locks others have, and until when they are tried
        self._news: list[Change] = []  # not returned yet
        self._draining: set[int] = set()  # asked back
        self._giving: set[int] = set()  # being given back right now
        self._reader: int | None = None  # the thread that is in `changes`
        self.closed = False

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The bundles that may be used now, in order of grant."""
        with self._lock:
            away = self._draining | self._unlocked.keys()
            return tuple(lease for epoch, lease in sorted(self._held.items()) if epoch not in away)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that may be used now, in order."""
        return tuple(sorted(device for lease in self.leases for device in lease.devices))

    def changes(self, stop: threading.Event | None = None) -> Iterator[Change]:
        """What happens to the bundles, as it happens; ends when `stop` is set or the pipeline ends.

        Raises what `poll` raises; called again, it goes on where it was.
        """
        wait_s = _POLL_S if stop is None else _STOP_POLL_S
        self._reader = threading.get_ident()
        try:
            while not self.closed and (stop is None or not stop.is_set()):
                yield from self._poll(wait_s)
        except PipelineGoneError as error:
            logger.info("the rollout of %s ends: %s", self.cluster, error)
        finally:
            self._reader = None

    def unread_here(self) -> tuple[Lease, ...]:
        """The bundles that nobody would be asked to give back while this thread waits for something."""
        return () if self._reader not in (None, threading.get_ident()) else self.leases

    def poll(self, wait_s: float = 0.0) -> list[Change]:
        """What has happened since the last call, waiting up to `wait_s` seconds for something to happen.

        Raises:
            SpecError: that is no time.
            RlixError: its block has ended.
            DeviceBusyError: somebody outside the pool has used a bundle's device for a while; names them. The bundle
                was given back, the others stay, and later calls go on with them.
        """
        self._check_open()
        check_wait(self.cluster, wait_s, MOST_SECONDS)
        return self._poll(wait_s)

    def _poll(self, wait_s: float) -> list[Change]:
        until = self._clock() + wait_s
        while True:
            left = max(0.0, until - self._clock())
            heard = self._hear(min(left, _LOCK_POLL_S if self._unlocked else MOST_WAIT_S))
            # A lock may take longer than a bundle has to be noted, so it is noted first: by what the next poll knows.
            while self._locks is not None and any(isinstance(change, Granted) for change in heard):
                heard = self._hear(0.0)
            self._take_locks()
            if self._news or self._clock() >= until:
                news, self._news = self._news, []
                return news

    def _hear(self, wait_s: float) -> list[Change]:
        with self._lock:
            held, draining = tuple(self._held), tuple(self._draining)
        try:
            answer = self._client.poll_rollout(self.cluster, held, draining, wait_s)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped by Ctrl-C while waiting for bundles of {self.cluster}") from None
        with self._lock:
            changes = self._take_up(answer)
        for change in changes:
            self._note(change)
        return changes

    def report(self, demand: Demand | int) -> None:
        """What is still to do; zero: nothing, and bundles go to whoever can use them.

        Raises:
            RlixError: its block has ended: nobody would give back what is granted.
        """
        self._check_open()
        self._client.report_demand(self.cluster, demand)

    def give_back(self, *leases: Lease) -> None:
        """The devices' memory is free. Also for leases that nobody asked back."""
        for lease in leases:
            if self._locks is not None:
                self._locks.drop(lease)
        epochs = {lease.epoch for lease in leases}
        with self._lock:
            self._giving |= epochs
        try:
            self._client.release(*leases)
        except StaleEpochError as error:
            logger.info("%s had ended already: %s", self.cluster, error)
        with self._lock:
            for epoch in epochs:
                self._held.pop(epoch, None)
            self._draining -= epochs
            self._giving -= epochs

    def _check_open(self) -> None:
        if self.closed:
            raise RlixError(f"this rollout of {self.cluster} has ended: open another one")

    def _note(self, change: Change) -> None:
        """A bundle whose locks are still to be taken is told of when they are; one that was not told of just goes."""
        epoch = change.lease.epoch
        if self._locks is None:
            self._news.append(change)
        elif isinstance(change, Granted):
            self._unlocked[epoch] = self._clock() + LOCK_TIMEOUT_S
        elif self._unlocked.pop(epoch, None) is None:
            if isinstance(change, Lost):
                self._locks.drop(change.lease)
            self._news.append(change)
        elif isinstance(change, Taken):
            self.give_back(change.lease)

    def _take_locks(self) -> None:
        """Those that are free by now."""
        for epoch, until in list(self._unlocked.items()):
            lease = self._held[epoch]
            try:
                assert self._locks is not None
                self._locks.take(lease, 0.0)
            except (DeviceBusyError, StaleEpochError) as error:
                busy = isinstance(error, DeviceBusyError)
                if busy and self._clock() < until:
                    continue
                del self._unlocked[epoch]
                self.give_back(lease)
                if busy:
                    raise
            else:
                del self._unlocked[epoch]
                self._news.append(Granted(lease))

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
        """Nothing is to be done any more; what is still held is given back.

        So is what was granted a moment ago and what is on its way: once nobody asks, nobody would give it back.
        """
        given: set[int] = set()
        with contextlib.suppress(PipelineGoneError):
            self.report(0)
            while True:
                with self._lock:
                    held = [lease for _, lease in sorted(self._held.items())]
                if held:
                    self.give_back(*held)
                given.update(lease.epoch for lease in held)
                if not self._more(given):
                    break
                self._hear(_STOP_POLL_S)
        self.closed = True

    def _more(self, given: set[int]) -> bool:
        """Whether the cluster has leases besides those that were given back and those that nobody can give back."""
        return any(
            status.lease.cluster == self.cluster
            and status.lease.phase is Phase.ROLLOUT
            and status.lease.epoch not in given
            and status.state is not LeaseState.QUARANTINED
            for status in self._client.leases()
        )


def is_time(value: object, most: float) -> bool:
    """Whether it is a number of seconds from 0 to `most`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def check_wait(cluster: str, wait_s: object, most: float = MOST_WAIT_S) -> None:
    """Raises SpecError unless it is a time to wait."""
    if not is_time(wait_s, most):
        raise SpecError(f"{cluster}: wait_s must be seconds from 0 to {most:g}, got {wait_s!r:.80}")
