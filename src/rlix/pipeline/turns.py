"""One gang for many runs: who waits for it stands in a queue, and a lease serves whoever is ready."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)

LINGER_S = 0.05
"""How long a lease waits for whoever comes next: between scoring and training a run computes on the CPU."""
_LOOK_S = 0.2


@dataclass(slots=True)
class Ticket:
    """A run that waits for its turn, or has it."""

    run: str
    phase: Phase
    thread: int = field(default_factory=threading.get_ident)
    granted: bool = False
    done: bool = False
    refused: BaseException | None = None


def next_turn(waiting: Sequence[Ticket], trained: Collection[str], last: str | None) -> Ticket | None:
    """Who is served next under a lease: the run that was served last, if it goes on with its step, else who came first.

    Whoever has trained under this lease waits for another one, so that no lease lasts for ever; None ends it.
    """
    ready = [ticket for ticket in waiting if ticket.run not in trained]
    return next((ticket for ticket in ready if ticket.run == last), ready[0] if ready else None)


class Turns:
    """Gives runs, each on a thread of its own, their turns.

    Args:
        hold: holds the gang, with the engine on it, for as long as the block lasts; raises when there will be none.
    """

    def __init__(self, hold: Callable[[Phase], AbstractContextManager[object]]) -> None:
        self._hold = hold
        self._waiting: list[Ticket] = []
        self._changed = threading.Condition()
        self._closed = False
        self.served: Ticket | None = None  # who has a turn now
        self._thread = threading.Thread(target=self._loop, name="turns", daemon=True)
        self._thread.start()

    @contextmanager
    def turn(self, run: str, phase: Phase, stop: threading.Event) -> Iterator[None]:
        """The block has the gang to itself.

        Raises:
            InterruptedError: `stop` was set while it waited. Whatever kept the gang from being held.
        """
        ticket = Ticket(run, phase)
        with self._changed:
            self._waiting.append(ticket)
            self._changed.notify_all()
            while not (ticket.granted or ticket.refused or stop.is_set() or self._closed):
                self._changed.wait(_LOOK_S)
            if not ticket.granted:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                raise ticket.refused or InterruptedError("the run was asked to stop while it waited for its turn")
        try:
            yield
        finally:
            with self._changed:
                ticket.done = True
                self._changed.notify_all()

    def close(self) -> None:
        """Nobody gets a turn any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                phase = self._waiting[0].phase
            try:
                with self._hold(phase):
                    self._serve()
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
                self._refuse(error)

    def _serve(self) -> None:
        trained: set[str] = set()
        last: str | None = None
        while (ticket := self._next(trained, last)) is not None:
            self.served = ticket
            with self._changed:  # whoever hangs in it ends the job, which sees to that
                self._changed.wait_for(lambda given=ticket: given.done)  # type: ignore[misc]
            last, self.served = ticket.run, None
            if ticket.phase is Phase.ACTOR_TRAINING:
                trained.add(last)

    def _next(self, trained: set[str], last: str | None) -> Ticket | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or next_turn(self._waiting, trained, last), LINGER_S)
            ticket = None if self._closed else next_turn(self._waiting, trained, last)
            if ticket is not None:
                self._waiting.remove(ticket)
                ticket.granted = True
                self._changed.notify_all()
            return ticket

    def _refuse(self, error: Exception) -> None:
        logger.warning("the gang could not be held: %s", error)
        with self._changed:
            for ticket in self._waiting:
                ticket.refused = error
            self._waiting.clear()
            self._changed.notify_all()
