"""The core without Ray: a clock, nodes and processes that a test moves by hand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlix.control.core import Core
from rlix.control.gang_queue import Asked, Ticket
from rlix.control.scheduler_service import Scheduler
from rlix.control.settings import Settings
from rlix.control.writer import EventStore
from rlix.protocol.events import DevicesDiscovered, Event, PipelineAdmitted, PipelineRegistered
from rlix.protocol.messages import (
    Cluster,
    Demand,
    Device,
    DeviceKind,
    Lease,
    LeaseState,
    Occupant,
    Process,
    Registration,
)
from rlix.protocol.types import Phase
from rlix.scheduler.policies import Policy
from rlix.sim.books import Forgetful
from rlix.sim.clock import VirtualClock

DEVICES = tuple(Device(i, "node", "127.0.0.1", i, DeviceKind.CPU, f"virtual-{i}") for i in range(4))
TRAIN = Cluster("actor_train", 1, (0, 1))
INFER = Cluster("actor_infer", 1, (0, 1, 2, 3), elastic=True)
POOL = "pool"


def process(pid: int) -> Process:
    return Process("node", pid, 1)


class Machine:
    """Processes and device locks. `immortal` processes survive being killed."""

    def __init__(self) -> None:
        self.locks: dict[int, Occupant] = {}
        self.killed: list[Process] = []
        self.told: dict[int, str] = {}  # why it is ended, by pid
        self.immortal: set[Process] = set()
        self.states_: dict[Process, str] = {}

    def lock(self, lease: Lease, holder: Process, devices: Iterable[int] | None = None) -> None:
        for device in lease.devices if devices is None else devices:
            there = self.locks.get(device)
            assert there is None or there.epoch == lease.epoch, f"device {device} is locked twice: {there} and {lease}"
            holders = (*(there.processes if there else ()), holder)
            self.locks[device] = Occupant(device, POOL, lease.epoch, holders)

    def unlock(self, holder: Process) -> None:
        for device, occupant in list(self.locks.items()):
            left = tuple(p for p in occupant.processes if p != holder)
            if left:
                self.locks[device] = replace(occupant, processes=left)
            else:
                del self.locks[device]

    def occupied(self, devices: Sequence[Device], done: Callable[[tuple[Occupant, ...]], None]) -> None:
        done(tuple(self.locks[device.id] for device in devices if device.id in self.locks))

    def kill(
        self,
        processes: Sequence[Process],
        why: str,
        done: Callable[[tuple[Process, ...]], None],
        devices: Sequence[Device] = (),
    ) -> None:
        """As a node does: with devices, nobody who has none of their locks."""
        lockers = {p for device in devices if device.id in self.locks for p in self.locks[device.id].processes}
        victims = [p for p in processes if not devices or p in lockers]
        self.killed += victims
        self.told |= {p.pid: why for p in victims if why}
        for victim in victims:
            if victim not in self.immortal:
                self.unlock(victim)
                self.states_[victim] = "dead"
        done(tuple(p for p in processes if p in self.immortal))

    def states(self, processes: Sequence[Process], done: Callable[[Mapping[Process, str]], None]) -> None:
        done({p: self.states_.get(p, "running") for p in processes})


def service_of(world: "World") -> Scheduler:
    """The service before the world's core."""
    service = Scheduler(world.settings, POOL)
    service._started = world.core
    return service


class World:
    """A core on four devices with admitted jobs `ft_1`, `ft_2`, ..."""

    def __init__(
        self,
        jobs: int = 2,
        *,
        clusters: tuple[Cluster, ...] = (TRAIN, INFER),
        journal: EventStore | None = None,
        policy: Policy | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.machine = Machine()
        self.journal = Forgetful() if journal is None else journal
        self.settings = settings or Settings(home=Path("unused"))
        self.core = self.new_core(policy)
        if not self.core.state.devices:
            self.core.record(DevicesDiscovered(DEVICES))
            for _ in range(jobs):
                self.add_job(clusters)
        self.run(0.0)

    def new_core(self, policy: Policy | None = None) -> Core:
        return Core(
            self.settings,
            self.journal,
            clock=self.clock,
            nodes=self.machine,
            pool=POOL,
            wall=lambda: 1e9 + self.clock.time(),
            policy=policy,
            stopwatch=lambda: 0.0,  # a busy machine must not postpone the planning of a heartbeat
        )

    def restart(self, events: Iterable[tuple[float, Event]]) -> None:
        """Another core, which knows only what the journal holds."""
        self.core.known.closed = True
        self.core = self.new_core()
        self.core.recover(events)

    def add_job(self, clusters: tuple[Cluster, ...] = (TRAIN, INFER)) -> str:
        pipeline_id = self.core.allocate("ft")
        self.core.record(PipelineRegistered(Registration(pipeline_id, "ns", clusters)), PipelineAdmitted(pipeline_id))
        return pipeline_id

    def run(self, seconds: float) -> None:
        self.clock.run(self.clock.time() + seconds)

    def ask(self, job: str, cluster: Cluster = TRAIN, phase: Phase = Phase.ACTOR_TRAINING, **asked: object) -> Ticket:
        ticket = self.core.request(job, cluster, phase, Asked(**asked))  # type: ignore[arg-type]
        self.run(0.0)
        return ticket

    def gang(self, job: str, cluster: Cluster = TRAIN, phase: Phase = Phase.ACTOR_TRAINING, **asked: object) -> Lease:
        outcome = self.ask(job, cluster, phase, **asked).outcome
        assert isinstance(outcome, Lease), outcome
        return outcome

    def roll(self, job: str, trajectories: int) -> tuple[Lease, ...]:
        """Reports demand; returns the bundles the job then holds, which it has noted."""
        self.core.report(job, INFER.name, Demand(trajectories))
        self.run(0.0)
        return self.note(job)

    def note(self, job: str) -> tuple[Lease, ...]:
        held = self.held(job)
        self.core.poll(job, INFER.name, {lease.epoch for lease in held}, set())
        return held

    def held(self, job: str, *states: LeaseState) -> tuple[Lease, ...]:
        wanted = states or (LeaseState.ACTIVE,)
        return tuple(s.lease for s in self.core.state.leases_of(job) if s.state in wanted)

    def release(self, lease: Lease) -> None:
        self.core.given_back(lease)
        self.run(0.0)
