"""When a trainer that somebody else wrote holds its devices: one stage at a time, with the bytes that it needs."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlix.control.program import Program
from rlix.protocol.errors import RlixError, WaitTimeoutError
from rlix.protocol.types import Phase

LEAVE_TIMEOUT_S = 300.0  # for the other ranks to have moved their bytes away
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Stage:
    """What a trainer is about to do. `name` is for people, `phase` says how urgent it is."""

    name: str
    phase: Phase


class Gate(Protocol):
    """Who lets a trainer onto its devices."""

    def enter(self, phase: Phase) -> tuple[int, ...]:
        """Waits for the devices; returns them."""
        ...

    def leave(self) -> None:
        """This process has no byte there any more."""
        ...


class ProgramGate:
    """The gang of an attached program, whose one process asks for it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._held = contextlib.ExitStack()

    def enter(self, phase: Phase) -> tuple[int, ...]:
        return self._held.enter_context(self._program.phase(phase)).devices

    def leave(self) -> None:
        self._held.close()


class RankGate:
    """The same for several ranks: rank 0 asks, the others wait at a store on the CPU.

    A collective would not do: ranks that wait inside one keep their devices busy, and it times out.

    Args:
        store: a torch.distributed store that all ranks use.
        inner: rank 0's gate; None for the others.
    """

    def __init__(self, rank: int, world_size: int, store: Any, inner: Gate | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._inner = inner
        self._number = 0

    def enter(self, phase: Phase) -> tuple[int, ...]:
        self._number += 1
        key = f"{self._number}/granted"
        if self._inner is None:
            granted = json.loads(self._await(key))
            if "error" in granted:
                raise RlixError(f"rank 0 got no lease: {granted['error']}")
            if granted["phase"] != phase.name:
                raise RlixError(
                    f"rank {self._rank} is about to do {phase.name} while rank 0 does {granted['phase']}: every rank "
                    "must generate, train and evaluate together"
                )
            return tuple(granted["devices"])
        try:
            devices = self._inner.enter(phase)
        except BaseException as error:  # raised again; the others would wait for ever
            self._store.set(key, json.dumps({"error": str(error)}))
            raise
        self._store.set(key, json.dumps({"phase": phase.name, "devices": devices}))
        return devices

    def leave(self) -> None:
        if self._inner is None:
            self._store.set(f"{self._number}/gone/{self._rank}", "")
            return
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        left = list(range(1, self._world_size))
        while left := [rank for rank in left if not self._store.check([f"{self._number}/gone/{rank}"])]:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"ranks {left} have not moved their bytes away within {LEAVE_TIMEOUT_S:.0f} s; rank 0 keeps the "
                    "lease until the program ends"
                )
            time.sleep(_POLL_S)
        for key in ("granted", *(f"gone/{rank}" for rank in range(1, self._world_size))):
            self._store.delete_key(f"{self._number}/{key}")
        self._inner.leave()

    def _await(self, key: str) -> str:
        """Standing in the queue is no error; when rank 0 dies, whoever started the ranks ends the others."""
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        return str(self._store.get(key).decode())


class Movable(Protocol):
    """Bytes that are on a device or in host memory: a `rlix.engine.guarded.GuardedSet`, or some in other processes."""

    @property
    def on_device(self) -> bool: ...

    def to_host(self) -> object: ...

    def to_device(self) -> object: ...

    def readable(self) -> contextlib.AbstractContextManager[None]: ...


class Listener(Protocol):
    """Hears what was done on devices, in Unix seconds; see `rlix.integrations.run_record`."""

    def did(self, stage: Stage, devices: Sequence[int], kind: str, start: float, end: float) -> None: ...


class Stages:
    """Which stage a trainer is in: its lease is held, and on the devices are the bytes that it needs and no others."""

    def __init__(self, gate: Gate, listener: Listener | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._gate = gate
        self._listener = listener
        self._clock = clock
        self._sets: list[Movable] = []
        self._devices: tuple[int, ...] = ()
        self._busy_since = 0.0
        self.stage: Stage | None = None

    def add(self, *sets: Movable) -> None:
        """Bytes that are on the device now, under the stage that is held, and leave at its end."""
        self._sets += sets

    def begin(self, stage: Stage, *sets: Movable) -> None:
        """Holds the lease of `stage`, with these bytes on the device; the stage before ends."""
        if self.stage != stage:
            self.end()
            self._devices = self._gate.enter(stage.phase)
            self.stage = stage
            self._busy_since = self._clock()
        if all(each.on_device for each in sets):
            return
        start = self._clock()
        try:
            for each in sets:
                each.to_device()
        except BaseException:  # raised again: what does not fit must not stay half
            self.end()
            raise
        self._busy_since = self._clock()
        self._told(stage, "load", start, self._busy_since)

    def end(self) -> None:
        """Every byte leaves, then the lease is given back. Nothing happens between stages."""
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
        before, had = self.stage, [each for each in self._sets if each.on_device]
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
        with contextlib.ExitStack() as reading:
            for each in self._sets:
                reading.enter_context(each.readable())
            yield

    def _told(self, stage: Stage, kind: str, start: float, end: float) -> None:
        if self._listener is not None and end > start:
            self._listener.did(stage, self._devices, kind, start, end)
