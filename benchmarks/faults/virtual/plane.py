"""The control plane of a virtual pool: the real service, core, loop and front of the nodes, over machines made up."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from benchmarks.faults.virtual.clock import VirtualLoop
from benchmarks.faults.virtual.machines import GIVEN_UP_S, Machine
from rlix.control.core import Core
from rlix.control.journal import JournalError, decode, encode
from rlix.control.live_nodes import ANSWER_S, LiveNodes, occupants
from rlix.control.resource_manager import devices_of
from rlix.control.scheduler_service import Scheduler
from rlix.control.settings import Settings
from rlix.node.node import Node
from rlix.protocol.errors import WaitTimeoutError
from rlix.protocol.events import Event
from rlix.protocol.messages import Device, DeviceKind
from rlix.protocol.types import HEAD_RESOURCE, VIRTUAL_DEVICE_RESOURCE

POOL = "pool"
EPOCH_S = 1e9  # unix seconds at the beginning
AWAY_S = 0.7  # until a scheduler that has ended is there again
_PAUSE_S = 0.3  # before an actor is asked again that is away
_COMPACT_AT = 60  # events: far fewer than in the real one

logger = logging.getLogger(__name__)


class CrashError(Exception):
    """The scheduler's process has ended, wherever it was."""


class Disk:
    """What the scheduler's journals have written, as they write it. `full`: nothing more. `slow_s`: each write takes
    so long. `crash_at`: the number of the event at which the scheduler ends, `crash_before` or after it is written."""

    def __init__(self, loop: VirtualLoop, seen: Callable[[Event], None], crash: Callable[[], None]) -> None:
        self._loop, self._seen, self._crash = loop, seen, crash
        self.rows: list[tuple[float, str, str]] = []
        self.written = 0
        self.full = False
        self.slow_s = 0.0
        self.crash_at = -1
        self.crash_before = False

    def append(self, events: Sequence[Event]) -> None:
        if self.full:
            raise JournalError("cannot write to the journal: the disk is full; free space on its disk")
        self._loop.advance(self.slow_s)
        for event in events:
            ends = self.written == self.crash_at
            if ends and self.crash_before:
                self._ends()
            self.rows.append((EPOCH_S + self._loop.time(), *encode(event)))
            self.written += 1
            self._seen(event)
            if ends:
                self._ends()

    def _ends(self) -> None:
        self.crash_at = -1
        self._crash()
        raise CrashError

    def replay(self) -> list[tuple[float, Event]]:
        return [(at, decode(name, body)) for at, name, body in self.rows]


class Journal:
    """One scheduler's way to the disk; after its end it leads nowhere."""

    def __init__(self, disk: Disk, loop: VirtualLoop) -> None:
        self._disk, self._loop = disk, loop
        self.cut = False

    def check(self, event: Event) -> None:
        encode(event)

    def append(self, events: Sequence[Event]) -> None:
        if not self.cut:
            self._disk.append(events)

    def compact(self, events: Sequence[Event]) -> None:
        if self._disk.full:
            raise JournalError("cannot write to the journal: the disk is full; free space on its disk")
        if not self.cut:
            self._disk.rows = [(EPOCH_S + self._loop.time(), *encode(event)) for event in events]

    def __len__(self) -> int:
        return len(self._disk.rows)

    def close(self) -> None:
        self.cut = True


class VirtualNodes(LiveNodes):
    """The real one, but for how an agent is reached and what Ray's node table says."""

    def __init__(self, head: Machine, machines: Sequence[Machine]) -> None:
        super().__init__(head.node_id, POOL)
        self._own.node = cast(Node, head)
        self._machines = machines

    async def count_dead(self) -> None:
        alive = {m.node_id for m in self._machines if m.counted}
        before = {f"{m.name}-{life}" for m in self._machines for life in range(1, m.lives + 1)}
        self._gone = before - alive

    async def _answer(self, node_id: str, method: str, *args: object) -> Any:
        machine = next((m for m in self._machines if m.node_id == node_id), None)
        if machine is not None and node_id == self._here:
            return _done(machine, method, *args)
        if machine is None or not machine.reached:
            await asyncio.sleep(ANSWER_S)
            raise WaitTimeoutError(f"no answer within {ANSWER_S} s: {method} on node {node_id}")
        await asyncio.sleep(machine.agent_s)
        if not machine.powered or machine.node_id != node_id:
            await asyncio.sleep(ANSWER_S)
        answer = _done(machine, method, *args)
        if not machine.reached:  # it was done, and nobody hears of it
            await asyncio.sleep(ANSWER_S)  # type: ignore[unreachable]
        return answer

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


def _done(machine: Machine, method: str, *args: Any) -> Any:
    match method:
        case "occupied":
            return occupants(cast(Node, machine), args[0])
        case "kill":
            return machine.kill(args[0], 5.0, args[1], args[2])
        case "newest_epoch":
            return machine.newest_epoch(args[0], args[1])
        case "states":
            return machine.states(args[0])
    raise ValueError(method)


class Plane:
    """The scheduler, started again when it ends, and who tells it of the nodes. Callers are as patient as `Patient`."""

    def __init__(self, loop: VirtualLoop, machines: Sequence[Machine], seen: Callable[[Event], None]) -> None:
        self.loop, self.machines = loop, machines
        self.settings = Settings(
            home=None,  # type: ignore[arg-type]
            shrink_deadline_s=8.0,
            grow_timeout_s=4.0,
            stopped_s=4.0,
            silent_s=20.0,
            idle_job_s=60.0,
            abandon_after_s=20.0,
        )
        self.disk = Disk(loop, seen, self.crash)
        self.service: Scheduler | None = None
        self.core: Core | None = None
        self.began_at = 0.0
        self.looks = True  # the resource manager lives
        self.crashes = 0
        self._nodes: VirtualNodes | None = None
        self._journal = Journal(self.disk, loop)
        self._ended = loop.create_future()

    # ---- the scheduler -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._journal = Journal(self.disk, self.loop)
        self._nodes = VirtualNodes(self.machines[0], self.machines)
        await self._nodes.count_dead()
        self._ended = self.loop.create_future()
        service = Scheduler(self.settings, POOL)
        core = Core(
            self.settings,
            self._journal,
            clock=self.loop,
            nodes=self._nodes,
            pool=POOL,
            wall=lambda: EPOCH_S + self.loop.time(),
            stopwatch=lambda: 0.0,
        )
        core.known.writer._compact_at = _COMPACT_AT
        service._started, service._nodes = core, self._nodes
        self.core = core
        core.recover(self.disk.replay())
        core.start()
        self.service, self.began_at = service, self.loop.time()

    def crash(self) -> None:
        """Its process is gone; Ray starts another."""
        if self.core is None:
            return
        self.crashes += 1
        self._journal.cut = True
        self.core.known.closed = True
        self.core = self.service = None
        if self._nodes is not None:
            self._nodes.end()
        if not self._ended.done():
            self._ended.set_result(None)
        self.loop.call_later(AWAY_S, lambda: self.loop.create_task(self._again()))

    async def _again(self) -> None:
        with contextlib.suppress(CrashError):  # `crash` has seen to the next
            await self.start()

    async def ask(self, caller: Machine | None, method: str, *args: object) -> Any:
        """What the scheduler answers, once it can be reached and is there."""
        while True:
            service = self.service
            if service is None or (caller is not None and not caller.reached):
                await asyncio.sleep(_PAUSE_S)
                continue
            asked = asyncio.ensure_future(getattr(service, method)(*args))
            try:
                await asyncio.wait((asked, self._ended), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                asked.add_done_callback(lambda task: task.cancelled() or task.exception())
                raise
            if self.service is not service or not asked.done():
                asked.cancel()
                await asyncio.wait((asked,))
                asked.cancelled() or asked.exception()
                continue
            if caller is not None and not caller.reached:
                asked.cancelled() or asked.exception()
                continue  # the answer is lost
            try:
                return asked.result()
            except CrashError:
                continue

    # ---- nodes -------------------------------------------------------------------------------------------------

    async def look_forever(self) -> None:
        """As the resource manager and Ray's node table do."""
        told: object = None
        while True:
            await asyncio.sleep(1.0)
            for machine in self.machines:
                self._count(machine)
            if not self.looks:
                continue
            found = self.found()
            if found != told:
                taken = await self.ask(None, "found", *found)
                told = found if taken == len(found[0]) else None

    def _count(self, machine: Machine) -> None:
        now = self.loop.time()
        if machine.reached:
            machine.silent_since = None
        elif machine.silent_since is None:
            machine.silent_since = now
        elif now - machine.silent_since >= GIVEN_UP_S:
            machine.counted = False

    def found(self) -> tuple[tuple[Device, ...], frozenset[str]]:
        lending = [m for m in self.machines if m.counted and m.fit]
        devices = devices_of([_row(m) for m in lending], {m.node_id: m.names() for m in lending})
        cordoned = self.core.state.cordoned if self.core is not None else ()
        return devices, frozenset(m.node_id for m in lending if m.node_id in cordoned)


def _row(machine: Machine) -> dict[str, Any]:
    resources: dict[str, float] = {"GPU": machine.gpus}
    if machine.kind is DeviceKind.CPU:
        resources[VIRTUAL_DEVICE_RESOURCE] = 1
    if machine.name == "host0":
        resources[HEAD_RESOURCE] = 1
    address = f"10.0.0.{1 + int(machine.name[4:])}"
    return {"Alive": True, "NodeID": machine.node_id, "NodeManagerAddress": address, "Resources": resources}
