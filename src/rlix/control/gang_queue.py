"""Callers that wait for a gang."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Cluster, Lease
from rlix.protocol.types import Phase


@dataclass(slots=True)
class Ticket:
    """One gang request and whoever waits for it. `epoch` is set once it is granted, perhaps before it is active."""

    request_id: int
    pipeline_id: str
    cluster: Cluster
    phase: Phase
    asked_at: float
    answer: "asyncio.Future[Lease]"
    epoch: int | None = None
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)


class GangQueue:
    """The tickets of requests whose answer has not been collected yet."""

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._granted: dict[int, Ticket] = {}  # by epoch, while the lease is not active yet
        self._loop = asyncio.get_running_loop()

    def open(self, request_id: int, pipeline_id: str, cluster: Cluster, phase: Phase) -> Ticket:
        ticket = Ticket(request_id, pipeline_id, cluster, phase, time.monotonic(), self._loop.create_future())
        self._tickets[ticket.request_id] = ticket
        return ticket

    def get(self, request_id: int) -> Ticket | None:
        return self._tickets.get(request_id)

    def of_pipeline(self, pipeline_id: str) -> Iterator[Ticket]:
        return (ticket for ticket in list(self._tickets.values()) if ticket.pipeline_id == pipeline_id)

    def after(self, ticket: Ticket, name: str, delay_s: float, action: Callable[[], None]) -> None:
        """Runs `action` in `delay_s` seconds, unless the ticket is closed or the timer of this name stopped before."""
        self.stop_timer(ticket, name)
        ticket.timers[name] = self._loop.call_later(delay_s, action)

    def stop_timer(self, ticket: Ticket, name: str) -> None:
        timer = ticket.timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def grant(self, request_id: int, epoch: int) -> None:
        """Notes which lease answers the request, once it becomes active."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            ticket.epoch = epoch
            self._granted[epoch] = ticket

    def answer(self, lease: Lease) -> float | None:
        """Hands the lease to whoever waits for it; returns how many seconds it took, None when nobody waits."""
        ticket = self._granted.pop(lease.epoch, None)
        if ticket is None or ticket.answer.done():
            return None
        self.stop_timer(ticket, "expiry")
        ticket.answer.set_result(lease)
        return time.monotonic() - ticket.asked_at

    def refuse(self, ticket: Ticket, error: RlixError) -> None:
        """Ends the wait with an error. The ticket stays until somebody collects that."""
        if not ticket.answer.done():
            ticket.answer.set_exception(error)
            ticket.answer.exception()  # nobody may be left to collect it, and that is not worth a warning

    def close(self, ticket: Ticket) -> None:
        """Forgets the ticket: its answer was collected, or nobody will."""
        for name in list(ticket.timers):
            self.stop_timer(ticket, name)
        self._tickets.pop(ticket.request_id, None)
        if ticket.epoch is not None:
            self._granted.pop(ticket.epoch, None)
