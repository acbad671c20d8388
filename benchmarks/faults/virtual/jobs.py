"""Jobs of a virtual pool: they roll out and train as real ones do, lock what they use, and put up with faults."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.faults.virtual.clock import VirtualLoop
from benchmarks.faults.virtual.machines import Machine, Proc
from benchmarks.faults.virtual.plane import POOL, Plane
from rlix.control.gang_queue import Asked
from rlix.control.journal import JournalError
from rlix.protocol.errors import DeviceBusyError, PipelineGoneError, RlixError, StaleEpochError, WaitTimeoutError
from rlix.protocol.messages import Demand, Device, Fence, Lease, RolloutAnswer
from rlix.protocol.types import Phase

PHASES = (Phase.ACTOR_TRAINING, Phase.CRITIC_TRAINING, Phase.OLD_LOG_PROBS, Phase.REFERENCE_LOG_PROBS)
Work = Callable[..., Coroutine[Any, Any, None]]
LOCK_S = 10.0  # for the devices' last user to be gone
_LOCK_POLL_S = 0.1


class Judge(Protocol):
    """Who is told what a job has seen."""

    def lost(self, job: "Job", what: str) -> None: ...

    def busy(self, job: "Job", device: Device, error: DeviceBusyError) -> None: ...

    def waited(self, job: "Job", seconds: float) -> None: ...

    def locked(self, job: "Job", device: Device, epoch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job is. `gang`, `roll`: its clusters, as they are registered, None: it has none. `alone`: the program
    keeps the bytes itself. `parts`: it gives a part of its gang back early. `lingers`: its locks go a
    moment after its word. `longest_s`, `timeout_s`: of its gangs. `move_s`: seconds that its gang's state
    takes elsewhere; 0: it has none."""

    home: int
    gang: Any = None
    roll: Any = None
    tensor_parallel_size: int = 1
    rounds: int = 2
    alone: bool = False
    parts: bool = False
    lingers: bool = False
    longest_s: float | None = None
    timeout_s: float | None = None
    move_s: float = 0.0


class GoneError(Exception):
    """The job is over."""


class Job:
    """One life of a job's program, and its workers. Faults set `slow_s` (what it takes to answer), `mute`, `hangs` and
    `deaf` (it asks nothing about its rollout)."""

    def __init__(self, name: str, plan: Plan, plane: Plane, judge: Judge, rng: random.Random) -> None:
        self.name, self.plan, self.plane, self.judge, self.rng = name, plan, plane, judge, rng
        self.loop: VirtualLoop = plane.loop
        self.home: Machine = plane.machines[plan.home]
        self.program: Proc = self.home.start(name, f"{name}'s program")
        self.program.on_end = self._program_ended
        self.workers: dict[tuple[str, int], Proc] = {}
        self.id = ""
        self.devices: set[int] = set()
        self.held: dict[int, Lease] = {}
        self.draining: set[int] = set()
        self.giving: set[int] = set()
        self.locking: set[int] = set()
        self.home_on: tuple[int, ...] = ()  # where its gang's state lies
        self.slow_s = 0.0
        self.mute = self.hangs = False
        self.done = self.over = False
        self.why_over = ""
        self._left = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._spawn(self._run)

    # ---- its own life ------------------------------------------------------------------------------------------

    def _spawn(self, work: Work, *args: Any) -> None:
        self._tasks.append(self.loop.create_task(self._guard(work, *args)))

    async def _guard(self, work: Work, *args: Any) -> None:
        try:
            await work(*args)
        except GoneError:
            self._end("gone")
        except PipelineGoneError as error:
            if not self.done:
                self.judge.lost(self, f"the job is gone: {error}")
            self._end(str(error))
        except RlixError as error:
            if not self.done:
                self.judge.lost(self, f"{type(error).__name__}: {error}")
            self._end(str(error))

    def _program_ended(self, why: str) -> None:
        self.over, self.why_over = True, self.why_over or why or "killed"
        for task in self._tasks:
            task.cancel()

    def _end(self, why: str) -> None:
        """The program ends by itself, and takes its workers with it."""
        self.why_over = self.why_over or why
        for worker in self.workers.values():
            worker.host.end(worker)
        self.home.end(self.program, why)

    async def _ask(self, method: str, *args: object) -> Any:
        await self._awake()
        answer = await self.plane.ask(self.home, method, self.id, *args)
        await self._awake()
        return answer

    async def _awake(self) -> None:
        while self.program.state == "stopped" or self.hangs:
            await asyncio.sleep(0.5)

    async def _run(self) -> None:
        while not self.id:
            try:
                self.id = await self.plane.ask(self.home, "allocate_pipeline_id", "ft")
            except JournalError:
                await asyncio.sleep(1.0)
        plan = self.plan
        mapping = {name: value for name, value in (("train", plan.gang), ("roll", plan.roll)) if value is not None}
        sizes = {"train": 1, "roll": plan.tensor_parallel_size}
        sizes = {name: sizes[name] for name in mapping}
        elastic = ["roll"] if plan.roll is not None else []
        registered = await self._ask(
            "register_pipeline", "ns", sizes, mapping, None, elastic, self.name, self.program.id
        )
        self.devices = {device for c in registered.clusters for choice in c.choices for device in choice}
        await self._ask("admit_pipeline")
        self._spawn(self._beat)
        if plan.roll is not None:
            self._spawn(self._roll)
        for step in range(plan.rounds):
            if plan.roll is not None:
                self._left = self.rng.uniform(2.0, 12.0)
                while self._left > 0.0:
                    await asyncio.sleep(0.5)
            while plan.gang is not None and not await self._train(step):
                await asyncio.sleep(0.5)
            await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        while any(epoch not in self.draining for epoch in self.held):
            await asyncio.sleep(0.5)
        self.done = True
        await self._ask("unregister_pipeline", "done", self.program.id)
        raise GoneError

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0 + self.slow_s)
            if not self.mute:
                await self._ask("beat", self.program.id, tuple(self.held))

    # ---- workers and locks -------------------------------------------------------------------------------------

    def _machine(self, device: Device) -> Machine | None:
        return next((m for m in self.plane.machines if m.node_id == device.node_id), None)

    async def _worker(self, cluster: str, rank: int, device: Device) -> Proc | None:
        """The process that keeps the bytes; None where its host is lost."""
        if self.plan.alone:
            return self.program
        machine = self._machine(device)
        if machine is None or not machine.powered:
            return None
        found = self.workers.get((cluster, rank))
        if found is None or not found.alive or found.host is not machine or found.id.node_id != machine.node_id:
            found = self.workers[cluster, rank] = machine.start(self.name, f"{cluster} {rank}")
            await self._ask("name_holders", cluster, {rank: found.id})
        return found

    async def _lock(self, cluster: str, lease: Lease) -> bool:
        """Whether the lease's devices are its own now: somebody else may keep one locked, or its host be lost."""
        known = {d.id: d for d in await self.plane.ask(self.home, "devices")}
        until = self.loop.time() + LOCK_S
        for number, device_id in enumerate(lease.devices):
            rank = number if lease.bundle is None else lease.bundle
            device = known.get(device_id)
            if device is None or (worker := await self._worker(cluster, rank, device)) is None:
                return False
            while True:
                if lease.epoch not in self.held or lease.epoch in self.draining:
                    return False
                try:
                    worker.host.lock(device.key, Fence(POOL, lease.epoch, self.name), worker)
                    self.judge.locked(self, device, lease.epoch)
                    break
                except DeviceBusyError as error:
                    if self.loop.time() >= until:
                        self.judge.busy(self, device, error)
                        return False
                    await asyncio.sleep(_LOCK_POLL_S)
                except StaleEpochError:
                    return False
        return True

    def _unlock(self, lease: Lease, keys: Sequence[str] | None = None) -> None:
        for machine in self.plane.machines:
            for key, lock in list(machine.locks.items()):
                if lock.fence.epoch == lease.epoch and (keys is None or key in keys):
                    for proc in [p for p in lock.holders if p.job == self.name and p.state == "running"]:
                        lock.holders.remove(proc)
                    if not lock.holders:
                        machine.locks.pop(key, None)

    def _alive(self, lease: Lease) -> bool:
        """Whether all its devices are still locked by its workers."""
        locked = sum(lock.fence.epoch == lease.epoch for m in self.plane.machines for lock in m.locks.values())
        return locked == len(lease.devices)

    def _work_stands(self, lease: Lease) -> bool:
        locks = [lock for m in self.plane.machines for lock in m.locks.values() if lock.fence.epoch == lease.epoch]
        return any(proc.state == "stopped" for lock in locks for proc in lock.holders)

    def _let_go(self, lease: Lease) -> None:
        if self.plan.lingers:
            self.loop.call_later(self.rng.uniform(0.05, 1.2), self._unlock, lease)
        else:
            self._unlock(lease)

    async def _release(self, lease: Lease) -> bool:
        """Whether the lease was still its own."""
        self._let_go(lease)
        self.held.pop(lease.epoch, None)
        self.draining.discard(lease.epoch)
        try:
            await self._ask("release", (lease.epoch,))
        except StaleEpochError as error:
            self.judge.lost(self, str(error))
            return False
        return True

    # ---- gangs -------------------------------------------------------------------------------------------------

    async def _train(self, step: int) -> bool:
        lease = await self._acquire(step)
        if lease is None:
            return False
        self.held[lease.epoch] = lease
        if not await self._lock("train", lease):
            await self._release(lease)
            return False
        if self.plan.parts and len(lease.devices) > 1:
            part = lease.devices[1:]
            known = {d.id: d.key for d in await self.plane.ask(self.home, "devices")}
            self._unlock(lease, [known[d] for d in part if d in known])
            try:
                lease = self.held[lease.epoch] = await self._ask("give_back", lease.epoch, part)
            except StaleEpochError as error:
                self.judge.lost(self, str(error))
                return await self._release(lease) and False
        until = self.loop.time() + self.rng.uniform(0.5, 4.0) + self.slow_s
        while self.loop.time() < until or self._work_stands(lease):
            await asyncio.sleep(0.5)
            await self._awake()
        stands = self._alive(lease)
        if self.plan.move_s:
            self.home_on = lease.devices
        return await self._release(lease) and stands

    async def _acquire(self, step: int) -> Lease | None:
        key, phase = f"{self.name}-{step}-{self.rng.random()}", self.rng.choice(PHASES)
        began = self.loop.time()
        deadline = None if self.plan.timeout_s is None else began + self.plan.timeout_s
        while True:
            left = None if deadline is None else max(0.001, deadline - self.loop.time())
            asked = Asked(
                key, self.program.id, (), left, self.plan.longest_s, home=self.home_on, move_s=self.plan.move_s
            )
            try:
                lease: Lease | None = await self._ask("poll_gang", "train", phase, asked, 5.0)
            except WaitTimeoutError:
                self.judge.waited(self, self.loop.time() - began)
                return None
            if lease is not None:
                self.judge.waited(self, self.loop.time() - began)
                return lease
            await asyncio.sleep(self.slow_s)

    # ---- rollouts ----------------------------------------------------------------------------------------------

    async def _roll(self) -> None:
        self._spawn(self._report)
        working: dict[int, Lease] = {}
        while True:
            asked = "roll", self.program.id, tuple(self._rolling()), tuple(self.draining)
            answer: RolloutAnswer = await self._ask("poll_rollout", *asked, 1.0)
            for epoch in answer.lost:
                lease = self.held.pop(epoch, None)
                working.pop(epoch, None)
                self.draining.discard(epoch)
                if lease is not None and epoch not in self.giving:
                    self.judge.lost(self, f"bundle {lease.devices} was lost")
                    self._unlock(lease)
            for lease in answer.granted:
                self.held[lease.epoch] = lease
                self._spawn(self._use, lease, working)
            for lease in answer.taken:
                if lease.epoch in self.held and lease.epoch not in self.draining:
                    self.draining.add(lease.epoch)
                    self._spawn(self._give_back, lease, working)
            self._left -= 0.3 * len(working)
            if self._left <= 0.0:
                for epoch, lease in list(self._rolling().items()):
                    if epoch not in self.draining:
                        self.draining.add(epoch)
                        self._spawn(self._give_back, lease, working)
            for epoch, lease in list(working.items()):
                if epoch not in self.draining and not self._alive(lease):  # a worker has died
                    self.draining.add(epoch)
                    self._spawn(self._give_back, lease, working)
            await asyncio.sleep(0.25 + self.slow_s / 2)

    def _rolling(self) -> dict[int, Lease]:
        return {epoch: lease for epoch, lease in self.held.items() if lease.phase is Phase.ROLLOUT}

    async def _report(self) -> None:
        while True:
            await self._ask("report_demand", "roll", Demand(max(0, math.ceil(4 * self._left))))
            await asyncio.sleep(0.5 + self.slow_s / 4)

    async def _use(self, lease: Lease, working: dict[int, Lease]) -> None:
        self.locking.add(lease.epoch)
        locked = await self._lock("roll", lease)
        self.locking.discard(lease.epoch)
        if lease.epoch not in self.held:
            self._unlock(lease)
        elif locked and lease.epoch not in self.draining:
            working[lease.epoch] = lease
        elif lease.epoch not in self.draining:
            self.draining.add(lease.epoch)
            await self._give_back(lease, working)

    async def _give_back(self, lease: Lease, working: dict[int, Lease]) -> None:
        working.pop(lease.epoch, None)
        await asyncio.sleep(self.rng.uniform(0.05, 0.4) + self.slow_s)
        await self._awake()
        if lease.epoch not in self.held:
            return
        while self._work_stands(lease) or lease.epoch in self.locking:
            await asyncio.sleep(0.5)
        self._let_go(lease)
        self.giving.add(lease.epoch)
        try:
            await self._ask("release", (lease.epoch,))
        except StaleEpochError as error:
            self.judge.lost(self, str(error))
        self.giving.discard(lease.epoch)
        self.held.pop(lease.epoch, None)
        self.draining.discard(lease.epoch)
