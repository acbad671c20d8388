"""The device lock seen from inside a job: parts take turns on the job's devices, and come and go by themselves."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import RayError

from rlix.protocol.errors import RlixError, WaitTimeoutError, WorkerError
from rlix.workers.locks.arbiter import Arbiter, Turn


class Occupant(Protocol):
    """A part with state on devices; both return when it is there on all of its ranks, or gone from all."""

    @property
    def name(self) -> str: ...

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def end(self) -> None:
        """What did not go is ended, whatever it does: nothing is there afterwards, and what it had is lost."""


@dataclass(slots=True)
class _Resident:
    """A state with bytes on devices; `loaded`: all of it, and not what an onload or offload left that `failed`."""

    occupant: Occupant
    devices: frozenset[int]
    loaded: bool = False
    failed: Exception | None = None


class DeviceLock:
    """Turns of parts on devices of one job.

    A part's state is brought on before its turn, and off when another part has its turn there. One that does not go, or
    came only in part, stays known: nothing is loaded on top of it, and who needs its place tries again.

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
        self._clock = clock

    @contextlib.contextmanager
    def turn(
        self,
        occupant: Occupant,
        devices: Collection[int],
        order: tuple[Any, ...] = (),
        *,
        timeout_s: float = 600.0,
    ) -> Iterator[Turn]:
        """Only this part computes on `devices` during the block, in which its state is there. May be entered again.

        Raises:
            WaitTimeoutError: not granted within `timeout_s`; says who has the devices.
            DeadlockError: the part has a turn on other devices.
            RlixError: its state did not come, or one that has its place did not go.
        """
        turn = self._await(occupant, devices, order, timeout_s)
        try:
            self._bring(occupant, frozenset(devices), timeout_s)
            yield turn
        finally:
            with self._changed:
                if turn.id in self._arbiter.held and self._arbiter.leave(turn.id):
                    self._arbiter.grant()
                    self._changed.notify_all()

    def clear(self, names: Collection[str] | None = None) -> None:
        """Bring these parts off, or all of them, between their turns: before the job gives their devices to others.

        Raises what the first of those that did not go raised, after all have been asked.
        """
        failed = []
        for name in list(self._resident):
            if names is not None and name not in names:
                continue
            with self._changed:
                (resident,) = self._leave([name])
            self._bring_off(resident)
            failed += [resident.failed] if resident.failed is not None else []
        if failed:
            raise failed[0]

    def end(self) -> None:
        """End what did not go when it was asked to: somebody else will have the devices."""
        with self._changed:
            left = self._leave(list(self._resident))
        for resident in left:
            try:
                resident.occupant.end()
            finally:
                with self._changed:
                    del self._leaving[resident.occupant.name]
                    self._changed.notify_all()

    def _await(self, occupant: Occupant, devices: Collection[int], order: tuple[Any, ...], limit: float) -> Turn:
        with self._changed:
            turn = self._arbiter.ask(occupant.name, devices, order)
            deadline = self._clock() + limit
            try:
                self._arbiter.grant()
                self._changed.notify_all()
                while turn.id in self._arbiter.waiting:
                    left = deadline - self._clock()
                    if left <= 0:
                        raise WaitTimeoutError(
                            f"{occupant.name} waited {limit:g} s for devices {sorted(devices)}, for: "
                            f"{self._arbiter.explain(turn)}"
                        )
                    self._changed.wait(left)
            finally:  # also on Ctrl-C: nobody waits behind a turn that nobody wants
                if turn.id in self._arbiter.waiting:
                    self._arbiter.withdraw(turn.id)
                    self._arbiter.grant()
                    self._changed.notify_all()
            return turn

    def _bring(self, occupant: Occupant, devices: frozenset[int], limit: float) -> None:
        """Who has the turn has the devices: nobody else brings anything onto them meanwhile."""
        with self._changed:
            leaving = self._leave([r.occupant.name for r in self._in_the_way(occupant, devices)])
        threads = [threading.Thread(target=self._bring_off, args=(resident,)) for resident in leaving[1:]]
        for thread in threads:
            thread.start()
        for resident in leaving[:1]:
            self._bring_off(resident)
        with self._changed:  # also for those that another part, which has other devices of theirs, is bringing off
            gone = self._changed.wait_for(lambda: not self._still_leaving(devices), limit)
            if not gone:
                names = ", ".join(self._still_leaving(devices))
                raise WaitTimeoutError(f"{occupant.name} waited {limit:g} s for {names} to leave {sorted(devices)}")
            for resident in self._in_the_way(occupant, devices):
                raise resident.failed or WorkerError(f"{resident.occupant.name} did not leave {sorted(devices)}")
            if occupant.name in self._resident:
                return
            mine = self._resident[occupant.name] = _Resident(occupant, devices)
        try:
            occupant.onload()
        except (RlixError, RayError) as error:
            mine.failed = error
            raise
        mine.loaded = True

    def _in_the_way(self, occupant: Occupant, devices: frozenset[int]) -> list[_Resident]:
        """Who must go before `occupant` has its turn: itself too, if it came only in part."""
        return [r for name, r in self._resident.items() if self._must_go(name, r, occupant, devices)]

    def _must_go(self, name: str, resident: _Resident, occupant: Occupant, devices: frozenset[int]) -> bool:
        if name == occupant.name:
            return not resident.loaded
        if not resident.devices & devices:
            return False
        return not any({name, occupant.name} <= together for together in self._together)

    def _still_leaving(self, devices: frozenset[int]) -> list[str]:
        return [name for name, resident in self._leaving.items() if resident.devices & devices]

    def _leave(self, names: Collection[str]) -> list[_Resident]:
        leaving = [self._resident.pop(name) for name in names]
        self._leaving.update((resident.occupant.name, resident) for resident in leaving)
        return leaving

    def _bring_off(self, resident: _Resident) -> None:
        resident.loaded, resident.failed, gone = False, None, False
        try:
            resident.occupant.offload()
            gone = True
        except (RlixError, RayError) as error:  # raised again where the turn was asked for
            resident.failed = error
        finally:
            with self._changed:
                del self._leaving[resident.occupant.name]
                if not gone:
                    self._resident[resident.occupant.name] = resident
                self._changed.notify_all()
