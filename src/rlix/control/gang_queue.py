"""Callers that wait for a gang."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rlix.control.ports import Clock
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Cluster, Lease, Process
from rlix.protocol.types import Phase


@dataclass(frozen=True, slots=True)
class Asked:
    """What a gang request may carry besides what it asks for; times are seconds. See `GangRequested`.

    `devices`: exactly these of the cluster's, in place of any of its choices. `giving`: the epochs of leases that are
    given back by the same question, once it has its place in the queue. `home`: where the gang's state lies, from where
    it takes `move_s` to any other of the choices.
    """

    key: str = ""
    holder: Process | None = None
    holding: tuple[int, ...] = ()
    timeout_s: float | None = None
    longest_s: float | None = None
    devices: tuple[int, ...] = ()
    giving: tuple[int, ...] = ()
    home: tuple[int, ...] = ()
    move_s: float = 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One gang request and whoever waits for it. `epoch` is set once it is granted, perhaps before it is active.

    While it waits: at `expires_at` its caller has waited as long as it wanted to, at `forget_at` nobody has asked
    again for too long.
    """

    request_id: int
    key: str
    pipeline_id: str
    cluster: Cluster
    phase: Phase
    asked_at: float  # of the clock
    epoch: int | None = None
    outcome: Lease | RlixError | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list)
    expires_at: float = math.inf
    timeout_s: float = math.inf
    forget_at: float = math.inf

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
        ticket.decide(lease)
        return self._clock.time() - ticket.asked_at

    def close(self, ticket: Ticket) -> None:
        """Forgets the ticket: its lease has ended, or it will never be granted."""
        self._tickets.pop(ticket.request_id, None)
        if self._by_key.get((ticket.pipeline_id, ticket.key)) is ticket:
            del self._by_key[ticket.pipeline_id, ticket.key]
        if ticket.epoch is not None:
            self._by_epoch.pop(ticket.epoch, None)
