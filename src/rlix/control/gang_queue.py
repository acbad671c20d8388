"""Callers that wait for a gang."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rlix.control.ports import Clock, Timer
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Cluster, Lease, Process
from rlix.protocol.types import Phase


@dataclass(frozen=True, slots=True)
class Asked:
    """What a gang request may carry besides what it asks for; times are seconds. See `GangRequested`.

    `devices`: exactly these of the cluster's, in place of any of its choices. `giving`: the epochs of leases that are
    given back by the same question, once it has its place in the queue.
    """

    key: str = ""
    holder: Process | None = None
    holding: tuple[int, ...] = ()
    timeout_s: float | None = None
    longest_s: float | None = None
    devices: tuple[int, ...] = ()
    giving: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Ticket:
    """One gang request and whoever waits for it. `epoch` is set once it is granted, perhaps before it is active."""

    request_id: int
    key: str
    pipeline_id: str
    cluster: Cluster
    phase: Phase
    asked_at: float  # of the clock
    epoch: int | None = None
    outcome: Lease | RlixError | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list)
    timers: dict[str, Timer] = field(default_factory=dict)

    def decide(self, outcome: Lease | RlixError) -> None:
        """Tells whoever waits; the first word counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            watcher()


class GangQueue:
    """The tickets of requests that wait, or whose lease is held; found by the client's key."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._by_key: dict[tuple[str, str], Ticket] = {}
        self._by_epoch: dict[int, Ticket] = {}

    def open(self, request_id: int, key: str, pipeline_id: str, cluster: Cluster, phase: Phase) -> Ticket:
        ticket = Ticket(request_id, key, pipeline_id, cluster, phase, self._clock.time())
        self._tickets[request_id] = ticket
        if key:
            self._by_key[pipeline_id, key] = ticket
        return ticket

    def find(self, pipeline_id: str, key: str) -> Ticket | None:
        return self._by_key.get((pipeline_id, key))

    def request(self, request_id: int) -> Ticket | None:
        return self._tickets.get(request_id)

    def holding(self, epoch: int) -> Ticket | None:
        """The ticket that this lease answers."""
        return self._by_epoch.get(epoch)

    def waiting(self) -> list[Ticket]:
        """The tickets without an answer."""
        return [ticket for ticket in self._tickets.values() if ticket.outcome is None]

    def of_pipeline(self, pipeline_id: str) -> Iterator[Ticket]:
        return (ticket for ticket in list(self._tickets.values()) if ticket.pipeline_id == pipeline_id)

    def after(self, ticket: Ticket, name: str, delay_s: float, action: Callable[[], None]) -> None:
        """Runs `action` in `delay_s` seconds, unless the ticket is closed or the timer of this name stopped before."""
        self.stop_timer(ticket, name)
        ticket.timers[name] = self._clock.call_later(delay_s, action)

    def stop_timer(self, ticket: Ticket, name: str) -> None:
        timer = ticket.timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def granted(self, request_id: int, epoch: int) -> None:
        """Notes which lease answers the request, once it becomes active."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            ticket.epoch = epoch
            self._by_epoch[epoch] = ticket

    def revoked(self, epoch: int) -> None:
        """The request waits again."""
        ticket = self._by_epoch.pop(epoch, None)
        if ticket is not None:
            ticket.epoch = None

    def answer(self, lease: Lease) -> float | None:
        """Hands the lease to whoever waits for it; returns how many seconds it took, None when nobody waits."""
        ticket = self._by_epoch.get(lease.epoch)
        if ticket is None or ticket.outcome is not None:
            return None
        self.stop_timer(ticket, "expiry")
        ticket.decide(lease)
        return self._clock.time() - ticket.asked_at

    def close(self, ticket: Ticket) -> None:
        """Forgets the ticket: its lease has ended, or it will never be granted."""
        for name in list(ticket.timers):
            self.stop_timer(ticket, name)
        self._tickets.pop(ticket.request_id, None)
        if self._by_key.get((ticket.pipeline_id, ticket.key)) is ticket:
            del self._by_key[ticket.pipeline_id, ticket.key]
        if ticket.epoch is not None:
            self._by_epoch.pop(ticket.epoch, None)
