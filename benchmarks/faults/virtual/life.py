"""One life of a virtual pool, and what must be true of it whatever happens."""

import asyncio
import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.virtual.clock import VirtualLoop
from benchmarks.faults.virtual.jobs import Job, Plan
from benchmarks.faults.virtual.machines import Machine, Proc
from benchmarks.faults.virtual.plane import POOL, CrashError, Plane
from benchmarks.faults.watcher import Ledger
from rlix.control.core import Core
from rlix.control.status import unpacked
from rlix.protocol.errors import DeviceBusyError, RlixError
from rlix.protocol.events import DevicesDiscovered, DevicesReleased, Event, LeaseQuarantined, LeaseReleased
from rlix.protocol.messages import Device, DeviceKind, LeaseState, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.image import image
from rlix.scheduler.snapshot import GANG_PATIENCE_S
from rlix.scheduler.state import State

HOSTS = ((2, DeviceKind.CPU), (4, DeviceKind.CUDA), (2, DeviceKind.CUDA), (0, DeviceKind.CPU))
END_S = 1500.0
SETTLED_S = 400.0  # after the last fault and the last job
IDLE_S, DEAD_S, LATE_S = 6.0, 25.0, 60.0
"""How long, while everything answers, something may stay as it is: a device that somebody waits for, free; a lease
whose processes are dead; one that drains."""

PLANS = (
    Plan(3, gang=[2, 3], rounds=3, lingers=True),
    Plan(1, gang=[4, 6], roll=[4, 5, 6, 7]),
    Plan(0, roll=[0, 1, 2, 3, 4, 5], lingers=True),
    Plan(3, roll=[2, 3, 4, 5], tensor_parallel_size=2, gang=[2, 3, 4, 5], parts=True),
    Plan(2, gang=[6], alone=True, rounds=4),
    Plan(0, gang=2, roll=4, timeout_s=20.0),
    Plan(1, gang={"min": 1, "max": 2}, rounds=3, longest_s=20.0),
    Plan(3, gang=[0, 1, 2, 3, 4, 5, 6, 7], rounds=1, parts=True),
    Plan(2, gang=2, rounds=5, move_s=1.0),
    Plan(0, gang=1, roll=3, rounds=4, move_s=30.0),
)


@dataclass
class Verdict:
    wrong: list[str] = field(default_factory=list)
    faults: int = 0
    killed: int = 0
    longest_wait_s: float = 0.0
    events: int = 0
    crashes: int = 0
    virtual_s: float = 0.0


class Life:
    """A pool of four hosts and a few jobs. Faults say whom they may harm: `may_end` are jobs that may be ended or lose
    a lease, `may_kill` those whose processes may be killed as well. Nobody else may notice more than a wait."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.loop = VirtualLoop()
        self.verdict = Verdict()
        self.ledger = Ledger()
        self.may_end: set[str] = set()
        self.may_kill: set[str] = {""}
        self.excused: set[str] = set()  # keys of devices that somebody may have locked who has no lease
        self.outage_s = 0.0
        self.seen_from = 0.0  # hosts did not answer until then, or a while before
        self.jobs: list[Job] = []
        self.on: dict[int, str] = {}  # machine by device
        numbers = itertools.count(100)
        self.machines = [Machine(f"host{n}", gpus, kind, numbers, self._killed) for n, (gpus, kind) in enumerate(HOSTS)]
        self.drains = 0  # hosts that are drained
        self._since: dict[tuple[str, Any], float] = {}
        self._said: Counter[str] = Counter()

    # ---- what jobs and machines say ----------------------------------------------------------------------------

    def wrong(self, what: str) -> None:
        kind = what[:24]
        self._said[kind] += 1
        if self._said[kind] <= 2:
            self.verdict.wrong.append(f"{self.loop.time():.2f} s: {what}")

    def _killed(self, proc: Proc, why: str) -> None:
        self.verdict.killed += 1
        job = next((job for job in self.jobs if job.name == proc.job), None)
        if proc.foreign:
            self.wrong(f"a stranger's process {proc.id} was to be killed: {why}")
        elif proc.job not in self.may_kill and not (job is not None and (job.done or job.over)):
            self.wrong(f"innocent killed: {proc.id} of {proc.job}: {why}")

    def lost(self, job: Job, what: str) -> None:
        if not job.done and job.name not in self.may_end | self.may_kill:
            self.wrong(f"innocent lost: {job.name}: {what}")

    def busy(self, job: Job, device: Device, error: DeviceBusyError) -> None:
        if POOL in str(error) and f"'{POOL}'" in str(error) and device.key not in self.excused:
            self.wrong(f"device granted that is used: {job.name}, {device.id}: {error}")

    def locked(self, job: Job, device: Device, epoch: int) -> None:
        if self.ledger.holder.get(device.id) == epoch:
            return
        if job.name in self.may_end | self.may_kill:
            self.excused.add(device.key)  # it was late, and has no lease any more
        else:
            self.wrong(f"locked without a lease: device {device.id} under {epoch}, {self.ledger.holder.get(device.id)}")

    def waited(self, job: Job, seconds: float) -> None:
        self.verdict.longest_wait_s = max(self.verdict.longest_wait_s, seconds)
        if seconds > 2 * GANG_PATIENCE_S + self.outage_s + 60.0:
            self.wrong(f"starved: {job.name} waited for {seconds:.0f} s")

    def _seen(self, event: Event) -> None:
        self.verdict.events += 1
        self._check_free(event)
        self._check_quarantine(event)
        self.ledger.apply(event)
        if isinstance(event, DevicesDiscovered):
            machines = {m.node_id: m.name for m in self.machines}
            self.on |= {d.id: machines[d.node_id] for d in event.devices if d.node_id in machines}
        for each in self.ledger.double:
            self.wrong(f"granted twice: {each}")
        self.ledger.double.clear()

    def _check_free(self, event: Event) -> None:
        """What a lease lets go of nobody has locked under it, wherever that can be seen."""
        core = self.plane.core
        if not isinstance(event, LeaseReleased | DevicesReleased) or core is None:
            return
        if isinstance(event, LeaseReleased) and event.reason is ReleaseReason.GIVEN_UP:
            return
        lease = self.ledger.leases.get(event.epoch)
        freed = event.devices if isinstance(event, DevicesReleased) else lease.devices if lease is not None else ()
        machines = {m.node_id: m for m in self.machines if m.counted}
        for device in filter(None, map(core.state.device, freed)):
            machine = machines.get(device.node_id)
            lock = machine.locks.get(device.key) if machine is not None else None
            if lock is not None and (lock.fence.pool, lock.fence.epoch) == (POOL, event.epoch):
                self.wrong(f"released while locked: {event}: device {device.id} by {[p.id for p in lock.holders]}")

    def _check_quarantine(self, event: Event) -> None:
        """What can be ended is ended, where it can be seen."""
        core = self.plane.core
        if not isinstance(event, LeaseQuarantined) or core is None or self.loop.time() < self.seen_from:
            return
        machines = {m.node_id: m for m in self.machines}
        devices = filter(None, map(core.state.device, self.ledger.leases[event.epoch].devices))
        there = [(machines.get(d.node_id), d.key) for d in devices]
        lockers = [p for m, key in there if m is not None and key in m.locks for p in m.locks[key].holders]
        if lockers and not any(p.undying or p.foreign for p in lockers):
            self.wrong(f"quarantined, not ended: {event}")

    def jobs_on(self, machine: Machine) -> set[str]:
        """Who may be harmed if the machine is."""

        def has(job: Job) -> bool:
            if job.home is machine or not job.id or not job.devices:
                return True
            return any(self.on.get(device) == machine.name for device in job.devices)

        return {job.name for job in self.jobs if has(job)}

    # ---- a life ------------------------------------------------------------------------------------------------

    def run(self, faults: Sequence[Coroutine[Any, Any, None]]) -> Verdict:
        logging.getLogger("rlix").addHandler(alarm := _Alarm(self))
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._raised)
        try:
            self.loop.run_until_complete(self._live(faults))
        except Exception as error:  # noqa: BLE001 - it is what a life may show
            self.wrong(f"the life ended with {type(error).__name__}: {error}")
        finally:
            logging.getLogger("rlix").removeHandler(alarm)
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.set_exception_handler(lambda loop, context: None)
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            asyncio.set_event_loop(None)
        self.verdict.crashes, self.verdict.virtual_s = self.plane.crashes, self.loop.time()
        return self.verdict

    def _raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, CrashError):
            self.wrong(f"raised in the loop: {context.get('message')}: {error!r}")

    def add_job(self, plan: Plan) -> Job:
        job = Job(f"job{len(self.jobs)}", plan, self.plane, self, random.Random(self.rng.random()))
        self.jobs.append(job)
        if any(not m.powered or not m.reached or not m.fit or m.lives > 1 for m in self.machines):
            self.may_kill.add(job.name)  # it may ask for what is not there
        return job

    async def _live(self, faults: Sequence[Coroutine[Any, Any, None]]) -> None:
        self.plane = Plane(self.loop, self.machines, self._seen)
        await self.plane.start()
        found = asyncio.ensure_future(self.plane.look_forever())
        while len(self.on) < 8:
            await asyncio.sleep(0.5)
        for plan in self.rng.sample(PLANS, self.rng.randint(3, 5)):
            self.add_job(plan)
            await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        looking = asyncio.ensure_future(self._look())
        working = [asyncio.ensure_future(fault) for fault in faults]
        self.verdict.faults = len(working)
        for done in await asyncio.gather(*working, return_exceptions=True):
            if isinstance(done, BaseException):
                self.wrong(f"a fault could not be injected: {done!r}")
        while self.loop.time() < END_S and not all(job.over for job in self.jobs):
            await asyncio.sleep(1.0)
        for job in self.jobs:
            if not job.over or (not job.done and job.name not in self.may_end | self.may_kill):
                self.wrong(f"not finished: {job.name} ({job.plan}): {job.why_over}")
        settled = self.loop.time() + SETTLED_S
        while self.loop.time() < settled and self._left():
            await asyncio.sleep(1.0)
        for what in self._left():
            self.wrong(f"leaked: {what}")
        self._read_again()
        looking.cancel()
        found.cancel()

    def _left(self) -> list[str]:
        """What is still there although all is over."""
        core = self.plane.core
        if core is None:
            return ["no scheduler"]
        known = core.known
        kept: dict[str, Any] = {
            "leases": [str(status) for status in core.state.leases.values()],
            "requests": dict(core.state.requests),
            "pipelines": list(core.state.allocated),
            "registrations": list(core.state.registrations),
            "jobs": list(known.jobs),
            "holds": dict(known.holds),
            "tickets": known.gangs.waiting(),
            "grants' times": dict(known.granted_at),
            "moments": dict(known.alarm._at),
            "watchers": {key: w for key, w in known._watchers.items() if w},
            "trouble": core.trouble,
            "cordoned": core.state.cordoned,
        }
        locks = {key: lock for m in self.machines for key, lock in m.locks.items()}
        kept["locks"] = {
            key: (lock.fence, [p.id for p in lock.holders]) for key, lock in locks.items() if key not in self.excused
        }
        here = {d.id for d in core.state.devices}
        kept["devices that are not there"] = {0} if len(here) != sum(gpus for gpus, _ in HOSTS) else set()
        return [f"{name}: {each}" for name, each in kept.items() if each]

    def _read_again(self) -> None:
        """What is in the journal makes up the state."""
        core, state = self.plane.core, State()
        if core is None:
            return
        for _, event in self.plane.disk.replay():
            state.apply(event, 0.0)
        kept, known = (image(each, -math.inf) for each in (state, core.state))  # but for how long who waits has waited
        if sorted(map(repr, kept)) != sorted(map(repr, known)):
            self.wrong(f"the journal tells another story: {kept} for {known}")

    # ---- while it lives ----------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if any(m.agent_s >= 1.0 or not m.reached for m in self.machines):
                self.seen_from = self.loop.time() + 90.0  # as long as it may be until it is looked again
            core, service = self.plane.core, self.plane.service
            if core is None or service is None or core.trouble:
                self._since.clear()
                continue
            try:
                status = unpacked(*await asyncio.wait_for(service.status(), 1.0))
            except (RlixError, TimeoutError) as error:
                self.wrong(f"no status: {error!r}")
                continue
            for waiting in status.waiting:
                if not waiting.behind:
                    self.wrong(f"unexplained: {waiting}")
                self._lasts("unexplained", waiting, "did not come to it" in waiting.behind, IDLE_S)
            self._judge(core)

    def _judge(self, core: Core) -> None:
        state, now = core.state, self.loop.time()
        quiet = now - self.plane.began_at > core.settings.settle_s and all(m.agent_s < 1.0 for m in self.machines)
        free = {d.id for d in state.lent if state.holder(d.id) is None and not state.successors((d.id,))}
        wanted = [{d for choice in r.choices for d in choice} for r in state.requests.values()]
        for request in state.requests.values():
            mine = {d for choice in request.choices for d in choice}
            others = sum(not mine.isdisjoint(other) for other in wanted) > 1
            idle = quiet and not others and any(free.issuperset(choice) for choice in request.choices)
            self._lasts(f"left idle: gang {request.pipeline_id}", request.id, idle, IDLE_S)
        for (pipeline_id, cluster), demand in state.demands.items():
            job = next((job for job in self.jobs if job.id == pipeline_id), None)
            rolls = demand.trajectories and job is not None and job.name not in self.may_end | self.may_kill
            held = [s for s in state.leases_of(pipeline_id) if s.lease.phase is Phase.ROLLOUT]
            bundles = state.registrations[pipeline_id].cluster(cluster).bundles
            here = [b for b in bundles if free.issuperset(b) and not any(not w.isdisjoint(b) for w in wanted)]
            idle = bool(quiet and rolls and not held and here)
            self._lasts(f"left idle: rollout {pipeline_id}", cluster, idle, 2 * IDLE_S)
        for status in state.leases.values():
            self._judge_lease(core, status.lease.epoch, quiet)
        for key in [key for key, since in self._since.items() if since < 0.0]:
            del self._since[key]

    def _judge_lease(self, core: Core, epoch: int, quiet: bool) -> None:
        status = core.state.leases[epoch]
        lease = status.lease
        devices = [d for d in map(core.state.device, lease.devices) if d is not None]
        machines = {m.node_id: m for m in self.machines}
        there = [machines[d.node_id] for d in devices if d.node_id in machines]
        answers = quiet and len(there) == len(lease.devices) and all(m.reached and m.powered for m in there)
        locks = [machines[d.node_id].locks.get(d.key) for d in devices if d.node_id in machines]
        job = next((job for job in self.jobs if job.id == lease.pipeline_id), None)
        quarantined = status.state is LeaseState.QUARANTINED
        dead = job is not None and job.over and not any(locks) and not quarantined
        self._lasts(f"kept for the dead: {lease.pipeline_id}", epoch, answers and dead, DEAD_S)
        limit_s = (lease.longest_s or 0.0) + DEAD_S
        outstays = bool(lease.longest_s) and status.state is LeaseState.ACTIVE
        self._lasts(f"outstays its phase: {lease.pipeline_id}", epoch, answers and outstays, limit_s)
        drains = status.state is LeaseState.DRAINING and not core.state.on_draining(lease.devices)
        self._lasts(f"drains for ever: {lease.pipeline_id}", epoch, answers and drains, LATE_S)
        if quarantined and not status.reason:
            self.wrong(f"quarantined for no reason: {status}")
        self._lasts(
            f"quarantined, and free: {lease.pipeline_id}", epoch, answers and quarantined and not any(locks), 70.0
        )
        self._lasts(f"never begins: {lease.pipeline_id}", epoch, self._may_begin(core, epoch), IDLE_S)

    def _may_begin(self, core: Core, epoch: int) -> bool:
        status = core.state.leases[epoch]
        return status.state is LeaseState.PENDING and all(core.state.holder(d) is None for d in status.lease.devices)

    def _lasts(self, what: str, about: Any, is_so: bool, limit_s: float) -> None:
        key = (what, about)
        if not is_so:
            self._since.pop(key, None)
        elif self.loop.time() - self._since.setdefault(key, self.loop.time()) > limit_s:
            self.wrong(f"{what}, for {limit_s:g} s: {about}")


class _Alarm(logging.Handler):
    """What is critical to the control plane is wrong, but for a full disk."""

    def __init__(self, life: Life) -> None:
        super().__init__(logging.CRITICAL)
        self._life = life

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if "disk is full" not in (text := record.getMessage()) and not isinstance(error, CrashError):
            self._life.wrong(f"critical: {text} {error!r}")
