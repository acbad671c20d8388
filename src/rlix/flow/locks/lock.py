"""The device lock seen from inside a job: parts take turns on the job's devices, and come and go by themselves."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import RayError

from rlix.flow.locks.arbiter import Arbiter, Turn
from rlix.protocol.errors import RlixError, WaitTimeoutError

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

    `together`: names of parts whose states fit at the same time, so that none goes for another's sake. Thread-safe.
    """

    def __init__(
        self, together: Collection[frozenset[str]] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._together = tuple(together)
        self._arbiter = Arbiter()
        self._changed = threading.Condition()
        self._resident: dict[str, _Resident] = {}
        self._leaving: dict[str, _Resident] = {}
        self._failed: dict[str, Exception] = {}
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
        """Who has the turn has the devices: nobody else brings anything onto them meanwhile."""
        with self._changed:
            going = [name for name, r in self._resident.items() if self._must_go(name, r, occupant, devices)]
            leaving = [self._resident.pop(name) for name in going]
            for resident in leaving:
                self._leaving[resident.occupant.name] = resident
        threads = [threading.Thread(target=self._bring_off, args=(resident,)) for resident in leaving[1:]]
        for thread in threads:
            thread.start()
        for resident in leaving[:1]:
            self._bring_off(resident)
        with self._changed:  # also for those that another part, which has other devices of theirs, is bringing off
            self._changed.wait_for(lambda: not any(r.devices & devices for r in self._leaving.values()))
            here = occupant.name in self._resident
            if failed := [self._failed.pop(r.occupant.name) for r in leaving if r.occupant.name in self._failed]:
                raise failed[0]
        if not here:
            occupant.onload()
            with self._changed:
                self._resident[occupant.name] = _Resident(occupant, devices)

    def _must_go(self, name: str, resident: _Resident, occupant: Occupant, devices: frozenset[int]) -> bool:
        if name == occupant.name or not resident.devices & devices:
            return False
        return not any({name, occupant.name} <= together for together in self._together)

    def _bring_off(self, resident: _Resident) -> None:
        name = resident.occupant.name
        try:
            resident.occupant.offload()
        except (RlixError, RayError) as error:  # raised again where the turn was asked for
            self._failed[name] = error
        finally:
            with self._changed:
                self._leaving.pop(name, None)
                self._changed.notify_all()
