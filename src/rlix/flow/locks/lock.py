"""The device lock seen from inside a job: parts take turns on the job's devices, and come and go by themselves."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rlix.flow.locks.arbiter import Arbiter, Turn
from rlix.protocol.errors import WaitTimeoutError

logger = logging.getLogger(__name__)


class Occupant(Protocol):
    """A part with state on devices; both return when it is there on all of its ranks, or gone from all."""

    @property
    def name(self) -> str: ...

    def onload(self) -> None: ...

    def offload(self) -> None: ...


@dataclass(slots=True)
class _Resident:
    occupant: Occupant
    devices: frozenset[int]


class DeviceLock:
    """Turns of parts on devices of one job.

    A part's state is brought on before its turn, and off when another part has its turn there.

    `together`: all parts' states fit at the same time, so none is ever brought off for another's sake. Thread-safe.
    """

    def __init__(self, *, together: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.together = together
        self._arbiter = Arbiter()
        self._changed = threading.Condition()
        self._resident: dict[str, _Resident] = {}
        self._clock = clock

    @contextlib.contextmanager
    def turn(
        self,
        occupant: Occupant,
        devices: Collection[int],
        order: tuple[Any, ...] = (),
        *,
        after: Collection[int] = (),
        timeout_s: float = 600.0,
    ) -> Iterator[Turn]:
        """Only this part computes on `devices` during the block, in which its state is there. May be entered again.

        Raises:
            WaitTimeoutError: not granted within `timeout_s`; says who has the devices.
            DeadlockError: the part has a turn on other devices.
        """
        turn = self._await(occupant, devices, order, after, timeout_s)
        try:
            self._bring(occupant, frozenset(devices))
            yield turn
        finally:
            with self._changed:
                if turn.id in self._arbiter.held and self._arbiter.leave(turn.id):
                    self._arbiter.grant()
                    self._changed.notify_all()

    def clear(self) -> None:
        """Bring every part off, between turns: before the job gives its devices to others."""
        for resident in list(self._resident.values()):
            resident.occupant.offload()
        self._resident.clear()

    def lose(self, name: str) -> None:
        """The part's processes have ended, and their bytes with them: its turn is over, others go on."""
        with self._changed:
            self._resident.pop(name, None)
            if self._arbiter.lose(name):
                logger.warning("%s ended while it had a turn, or waited for one", name)
            self._arbiter.grant()
            self._changed.notify_all()

    def _await(
        self, occupant: Occupant, devices: Collection[int], order: tuple[Any, ...], after: Collection[int], limit: float
    ) -> Turn:
        with self._changed:
            turn = self._arbiter.ask(occupant.name, devices, order, after=after)
            deadline = self._clock() + limit
            self._arbiter.grant()
            self._changed.notify_all()
            while turn.id in self._arbiter.waiting:
                left = deadline - self._clock()
                if left <= 0:
                    why = self._arbiter.explain(turn)
                    self._arbiter.withdraw(turn.id)
                    self._arbiter.grant()
                    self._changed.notify_all()
                    raise WaitTimeoutError(
                        f"{occupant.name} waited {limit:g} s for devices {sorted(devices)}, for: {why}"
                    )
                self._changed.wait(left)
            if turn.id not in self._arbiter.held:
                raise WaitTimeoutError(f"{occupant.name} was ended while it waited for devices {sorted(devices)}")
            return turn

    def _bring(self, occupant: Occupant, devices: frozenset[int]) -> None:
        """Who has the turn has the devices: nobody else moves what is on them meanwhile."""
        with self._changed:
            others = [r for n, r in self._resident.items() if n != occupant.name and r.devices & devices]
            here = occupant.name in self._resident
        for resident in others if not self.together else ():
            resident.occupant.offload()
            with self._changed:
                self._resident.pop(resident.occupant.name, None)
        if not here:
            occupant.onload()
            with self._changed:
                self._resident[occupant.name] = _Resident(occupant, devices)
