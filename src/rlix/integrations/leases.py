"""When a trainer that somebody else wrote holds its devices: one stage at a time, with the bytes that it needs."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlix.control.program import Program
from rlix.engine.guarded import GuardedSet
from rlix.protocol.errors import RlixError
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""Between stages: how long after its last touch of the bytes a program keeps the devices."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a trainer is about to do. `name` is for people, `phase` says how urgent it is."""

    name: str
    phase: Phase


SCRIPT = Stage("script", Phase.VALUE_COMPUTE)
"""What the program itself does with the bytes between stages. It cannot be preempted: the least urgent gang."""


class Gate(Protocol):
    """Who lets a trainer onto its devices."""

    def enter(self, phase: Phase, *, alone: bool = False) -> tuple[int, ...]:
        """Waits for the devices; returns them. `alone`: of several ranks this one, without the others."""
        ...

    def leave(self) -> None:
        """This process has no byte there any more."""
        ...


class ProgramGate:
    """The gang of an attached program, whose one process asks for it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._held = contextlib.ExitStack()

    def enter(self, phase: Phase, *, alone: bool = False) -> tuple[int, ...]:
        return self._held.enter_context(self._program.phase(phase)).devices

    def leave(self) -> None:
        self._held.close()


class Movable(Protocol):
    """Bytes that are on a device or in host memory: a `rlix.engine.guarded.GuardedSet`, or some in other processes."""

    @property
    def on_device(self) -> bool: ...

    def to_host(self) -> object: ...

    def to_device(self) -> object: ...

    def readable(self) -> contextlib.AbstractContextManager[None]: ...


class Listener(Protocol):
    """Hears what was done on devices, in Unix seconds; see `rlix.control.run_record`."""

    def did(self, stage: str, devices: Sequence[int], kind: str, start: float, end: float) -> None: ...


class Stages:
    """Which stage a trainer is in: its lease is held, and on the devices are the bytes that it needs and no others.

    Between stages the bytes are the program's own (`lent`): whoever touches them has a lease for it.
    """

    def __init__(
        self,
        gate: Gate,
        listener: Listener | None = None,
        *,
        clock: Callable[[], float] = time.time,
        idle_s: float = IDLE_S,
    ) -> None:
        self._gate = gate
        self._listener = listener
        self._clock = clock
        self._idle_s = idle_s
        self._sets: list[Movable] = []
        self._devices: tuple[int, ...] = ()
        self._busy_since = 0.0
        self._touched = 0.0
        self._moving = threading.RLock()  # who touches the bytes between stages, and who takes them away
        self._over = threading.Event()
        self.stage: Stage | None = None

    def add(self, *sets: Movable) -> None:
        """Bytes that are on the device now, under the stage that is held, and leave at its end."""
        self._sets += sets

    def begin(self, stage: Stage, *sets: Movable) -> None:
        """Holds the lease of `stage`, with these bytes on the device; the stage before ends."""
        with self._moving:
            if self.stage != stage:
                self.end()
                self._devices = self._gate.enter(stage.phase, alone=stage == SCRIPT)
                self.stage = stage
                self._busy_since = self._clock()
            self._bring(stage, [each.to_device for each in sets if not each.on_device])

    def end(self) -> None:
        """Every byte leaves, then the lease is given back. Nothing happens between stages."""
        with self._moving:
            if self.stage is None:
                return
            stage, start = self.stage, self._clock()
            self._told(stage, "busy", self._busy_since, start)
            for each in self._sets:
                each.to_host()
            self._told(stage, "offload", start, self._clock())
            self.stage = None
            self._gate.leave()

    @contextlib.contextmanager
    def within(self, stage: Stage, *sets: Movable) -> Iterator[None]:
        """The block runs in `stage`; afterwards it ends, and the stage before is begun again, with what it had."""
        if self.stage == stage:
            with self.beside(*sets):
                yield
            return
        with self._moving:
            before = None if self.stage == SCRIPT else self.stage
            had = [each for each in self._sets if each.on_device]
            self.begin(stage, *sets)
        try:
            yield
        finally:
            self.end()
        if before is not None:
            self.begin(before, *had)

    @contextlib.contextmanager
    def beside(self, *sets: Movable) -> Iterator[None]:
        """These bytes are on the device too while the block runs, under the lease that is held anyway."""
        added = [each for each in sets if not each.on_device]
        for each in added:
            each.to_device()
        try:
            yield
        finally:
            for each in added:
                each.to_host()

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Everything may be read where it is, to save it, which needs no device."""
        with self._moving, contextlib.ExitStack() as reading:
            for each in self._sets:
                reading.enter_context(each.readable())
            yield

    # ---- between stages: what a `GuardedSet` asks for ----------------------------------------------------------

    @contextlib.contextmanager
    def lent(self, sets: Sequence[GuardedSet]) -> Iterator[None]:
        """Somebody touches these. In a stage they stay until it ends. Between stages the program gets the lease for it,
        until it has not touched anything for a while, or a stage begins."""
        with self._moving:
            if self.stage is None:
                self.begin(SCRIPT)
                threading.Thread(target=self._watch, name="script's lease", daemon=True).start()
            stage = self.stage or SCRIPT
            away = [each for each in sets if not each.on_device]
            self._bring(stage, [functools.partial(each.to_device, guarded=stage == SCRIPT) for each in away])
            try:
                yield
            finally:
                self._touched = self._clock()

    def end_if_idle(self) -> bool:
        """Ends what the program does between stages, if it does nothing; says whether that is over."""
        with self._moving:
            if self.stage != SCRIPT:
                return True
            lent = [each for each in self._sets if each.on_device and isinstance(each, GuardedSet)]
            if self._clock() - self._touched < self._idle_s or any(each.in_use for each in lent):
                return False
            self.end()
            return True

    def close(self) -> None:
        """The process ends: what is held now it keeps until then."""
        self._over.set()

    def _watch(self) -> None:
        try:
            while not (self._over.wait(self._idle_s / 2) or self.end_if_idle()):
                pass
        except RlixError as error:
            logger.warning("what the program holds between stages was not given back: %s", error)

    def _bring(self, stage: Stage, moves: Sequence[Callable[[], object]]) -> None:
        if not moves:
            return
        start = self._clock()
        try:
            for move in moves:
                move()
        except BaseException:  # raised again: what does not fit must not stay half
            self.end()
            raise
        self._busy_since = self._clock()
        self._told(stage, "load", start, self._busy_since)

    def _told(self, stage: Stage, kind: str, start: float, end: float) -> None:
        if self._listener is not None and end > start:
            self._listener.did(stage.name, self._devices, kind, start, end)
