"""Hosts with devices, device locks and processes, and what breaks in them. They are what is true of the pool."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlix.node.device_lock import LockRecord
from rlix.node.devices import virtual_key
from rlix.protocol.errors import DeviceBusyError, StaleEpochError
from rlix.protocol.messages import Device, DeviceKind, Fence, Process

GIVEN_UP_S = 4.0  # Ray counts a host as dead that it has not heard of for so long


@dataclass(eq=False)
class Proc:
    """A process. `undying`: in an uninterruptible system call; it ends when that does."""

    host: "Machine"
    id: Process
    job: str
    on_end: Callable[[str], None] = lambda why: None
    state: str = "running"
    undying: bool = False
    condemned: bool = False
    foreign: bool = False  # another user's

    @property
    def alive(self) -> bool:
        return self.state != "dead"


@dataclass
class Lock:
    fence: Fence
    holders: list[Proc]


@dataclass(eq=False)
class Machine:
    """One host. `reached`: by the others, over its network. `counted`: by Ray, under its `node_id`; a host that was
    given up comes back under another. `agent_s`: what its agent takes to answer."""

    name: str
    gpus: int
    kind: DeviceKind
    numbers: "itertools.count[int]"
    on_kill: Callable[[Proc, str], None]
    node_id: str = ""
    powered: bool = True
    reached: bool = True
    counted: bool = True
    fit: bool = True
    agent_s: float = 0.005
    procs: dict[int, Proc] = field(default_factory=dict)
    locks: dict[str, Lock] = field(default_factory=dict)
    newest: dict[tuple[str, str], int] = field(default_factory=dict)
    silent_since: float | None = None
    lives: int = 0

    def __post_init__(self) -> None:
        self.join()

    def join(self) -> None:
        """Ray, under a node id of its own."""
        self.lives += 1
        self.node_id, self.counted, self.silent_since = f"{self.name}-{self.lives}", True, None

    def names(self) -> tuple[str, ...]:
        """A GPU has its name for ever, a virtual one is called after its node."""
        where = f"{self.name}-gpu" if self.kind is DeviceKind.CUDA else virtual_key(self.node_id)
        return tuple(f"{where}{number}" for number in range(self.gpus))

    def start(self, job: str, name: str = "", *, foreign: bool = False) -> Proc:
        number = next(self.numbers)
        proc = Proc(self, Process(self.node_id, number, 7 * number, name), job, foreign=foreign)
        self.procs[number] = proc
        return proc

    # ---- locks -------------------------------------------------------------------------------------------------

    def lock(self, key: str, fence: Fence, proc: Proc) -> None:
        there = self.locks.get(key)
        if there is not None and (there.fence.pool, there.fence.epoch) != (fence.pool, fence.epoch):
            raise DeviceBusyError(f"device {key} is in use by {[p.id for p in there.holders]} of {there.fence}")
        if fence.epoch < self.newest.get((fence.pool, key), 0):
            raise StaleEpochError(f"device {key} has seen a newer epoch than {fence.epoch}")
        self.newest[fence.pool, key] = fence.epoch
        if there is None:
            self.locks[key] = Lock(fence, [proc])
        elif proc not in there.holders:
            there.holders.append(proc)

    def unlock(self, proc: Proc, epoch: int | None = None) -> None:
        for key, lock in list(self.locks.items()):
            if proc in lock.holders and epoch in (None, lock.fence.epoch):
                lock.holders.remove(proc)
                if not lock.holders:
                    del self.locks[key]

    # ---- processes ---------------------------------------------------------------------------------------------

    def end(self, proc: Proc, why: str = "") -> None:
        if proc.alive:
            proc.state = "dead"
            self.unlock(proc)
            proc.on_end(why)

    def off(self) -> None:
        """As if the power failed."""
        self.powered = self.reached = False
        for proc in list(self.procs.values()):
            proc.undying = False
            self.end(proc, "its host lost power")

    # ---- what `rlix.node.node.Node` answers --------------------------------------------------------------------

    def holders(self, devices: Sequence[Device]) -> dict[int, LockRecord]:
        found = {}
        for device in devices:
            lock = self.locks.get(device.key)
            if lock is not None:
                seen = tuple(replace(proc.id, node_id=self.node_id) for proc in lock.holders)
                found[device.id] = LockRecord(device.key, lock.fence, 0.0, seen)
        return found

    def newest_epoch(self, devices: Iterable[Device], pool: str) -> int:
        return max((self.newest.get((pool, device.key), 0) for device in devices), default=0)

    def states(self, processes: Iterable[Process]) -> dict[Process, Any]:
        return {p: proc.state if (proc := self._found(p)) is not None else "dead" for p in processes}

    def _found(self, process: Process) -> Proc | None:
        proc = self.procs.get(process.pid)
        return proc if proc is not None and proc.id.started == process.started else None

    def kill(
        self, processes: Iterable[Process], timeout_s: float, why: str = "", devices: Sequence[Device] = ()
    ) -> tuple[Process, ...]:
        lockers = {p for record in self.holders(devices).values() for p in record.processes}
        left = []
        for process in processes:
            proc = self._found(process)
            if proc is None or not proc.alive:
                continue
            if (replace(process, node_id=self.node_id) not in lockers) if devices else proc.foreign:
                left.append(process)
                continue
            self.on_kill(proc, why)
            if proc.foreign or proc.undying:
                proc.condemned = not proc.foreign
                left.append(process)
            else:
                self.end(proc, why)
        return tuple(left)
