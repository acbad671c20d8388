"""A pool that lives: time passes in ticks, gangs and rollouts end, and a policy divides; for properties in seconds."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlix.protocol.events import (
    DemandReported,
    DevicesDiscovered,
    DrainStarted,
    Event,
    GangRequested,
    LeaseGranted,
    LeaseReleased,
    PipelineAdmitted,
    PipelineEnding,
    PipelineRegistered,
    PipelineUnregistered,
)
from rlix.protocol.messages import Cluster, Demand, LeaseState, Registration, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.policies import Policy
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State
from rlix.sim.baselines import Partitioned, PoolShape, confined, least_part
from tests.scheduler.world import INFER, TRAIN, devices

DRAIN_S = 2.0


@dataclass
class Life:
    """One policy's pool; a tick is a second. `jobs` is how many there may ever be, for policies that cut parts."""

    gpus: int
    policy: Policy
    jobs: int = 8
    now: float = 0.0
    state: State = field(default_factory=State)
    switches: int = 0
    longest_gang_wait_s: float = 0.0  # from its question until it is granted
    longest_wait_s: float = 0.0  # of a rollout with demand and none of its bundles, while gangs left it one
    _demands: dict[str, Demand] = field(default_factory=dict)
    _used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _since: dict[str, float] = field(default_factory=dict)
    _waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _gang_ends: dict[int, float] = field(default_factory=dict)  # by epoch
    _gang_s: dict[int, float] = field(default_factory=dict)  # by request
    _drained: dict[int, float] = field(default_factory=dict)  # epoch -> when it will have given back

    def __post_init__(self) -> None:
        self.apply(DevicesDiscovered(devices(self.gpus)))

    def apply(self, event: Event) -> None:
        for lease in self.state.apply(event, self.now):
            if lease.bundle is None:
                self._gang_ends[lease.epoch] = self.now + self._gang_s.pop(lease.epoch)

    # -- what happens ------------------------------------------------------------------------------------------------

    def arrive(self, name: str, size: int = 1, gang: int = 1) -> bool:
        """A job that may use the whole pool; False when a policy that cuts parts has none left."""
        pool = tuple(range(self.gpus - self.gpus % size))
        clusters = (Cluster(INFER, size, pool, elastic=True), Cluster(TRAIN, 1, pool[:gang]))
        registration = Registration(name, "ns", clusters)
        if isinstance(self.policy, Partitioned):
            taken = {device for r in self.state.registrations.values() for c in r.clusters for device in c.devices}
            to_come = (self.jobs - len(self.state.registrations) - 1) * least_part(size, self.gpus, self.jobs)
            shape = PoolShape(self.gpus, frozenset(range(self.gpus)) - taken, self.jobs, to_come)
            part = self.policy.part(registration, shape)
            if part is None:
                return False
            registration = confined(registration, part)
        self.apply(PipelineRegistered(registration))
        self.apply(PipelineAdmitted(name))
        self._since[name] = self.now
        return True

    def report(self, name: str, demand: Demand) -> None:
        self._demands[name] = demand
        self.apply(DemandReported(name, INFER, demand))

    def train(self, name: str, seconds: float, phase: Phase = Phase.ACTOR_TRAINING) -> None:
        """Asks for the job's gang, which lasts so long once it is granted."""
        request_id = self.state.next_request_id
        self._gang_s[-request_id] = seconds
        self.apply(GangRequested(request_id, name, TRAIN, phase))

    def leave(self, name: str) -> None:
        self.apply(PipelineEnding(name, "done"))
        for status in self.state.leases_of(name):
            self.apply(LeaseReleased(status.lease.epoch, ReleaseReason.UNREGISTERED))
        self.apply(PipelineUnregistered(name, "done"))
        self._demands.pop(name, None)
        self._waits.pop(name, None)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    def tick(self) -> None:
        """One second: what is over ends, everybody reports, one plan is carried out."""
        leases = self.state.leases
        for epoch in [e for e, ends in self._gang_ends.items() if ends <= self.now or e not in leases]:
            del self._gang_ends[epoch]
            if epoch in leases:
                self.apply(LeaseReleased(epoch, ReleaseReason.RELEASED))
        for epoch in [e for e, ends in self._drained.items() if ends <= self.now or e not in leases]:
            del self._drained[epoch]
            if epoch in leases:
                self.apply(LeaseReleased(epoch, ReleaseReason.SHRUNK))
        for name, demand in self._demands.items():
            self.apply(DemandReported(name, INFER, demand))
        self.cycle()
        self._count()
        self.now += 1.0

    def acknowledge(self) -> None:
        """Whatever drains is given back now."""
        for epoch in [epoch for epoch in self._drained if epoch in self.state.leases]:
            self.apply(LeaseReleased(epoch, ReleaseReason.SHRUNK))
        self._drained.clear()

    def cycle(self) -> int:
        """One plan; returns how many events carried it out."""
        events = decide(self.snapshot(), self.state, self.policy)
        for event in events:
            if isinstance(event, DrainStarted):
                self._drained[event.epoch] = self.now + DRAIN_S
            elif isinstance(event, LeaseGranted) and event.request_id is not None:
                self._gang_s[event.lease.epoch] = self._gang_s.pop(-event.request_id)
            else:
                self.switches += 1
            self.apply(event)
        return len(events)

    # -- what is seen ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        snapshot = self.state.snapshot(self.now)
        known = tuple(
            replace(r, used_gpu_s=self._used[r.pipeline_id], age_s=self.now - self._since[r.pipeline_id])
            for r in snapshot.rollouts
        )
        return replace(snapshot, rollouts=known)

    @property
    def used_gpu_s(self) -> Mapping[str, float]:
        return self._used

    def widths(self) -> dict[str, int]:
        """Rollout devices by job."""
        widths = dict.fromkeys(self.state.registrations, 0)
        for status in self.state.leases.values():
            if status.lease.bundle is not None and status.state is not LeaseState.DRAINING:
                widths[status.lease.pipeline_id] += len(status.lease.devices)
        return widths

    def _count(self) -> None:
        """One second of every lease in use, and of everybody's wait for a first bundle."""
        for request in self.state.requests.values():
            self.longest_gang_wait_s = max(self.longest_gang_wait_s, self.now - request.asked_at)
        barred = {device for request in self.state.requests.values() for device in request.devices}
        for status in self.state.leases.values():
            if status.state is LeaseState.ACTIVE:
                self._used[status.lease.pipeline_id] += len(status.lease.devices)
            if status.lease.bundle is None:
                barred.update(status.lease.devices)
        widths = self.widths()
        for name, demand in self._demands.items():
            if not demand.trajectories or widths[name]:
                self._waits[name] = 0.0
            elif any(barred.isdisjoint(b) for b in self.state.registrations[name].cluster(INFER).bundles):
                self._waits[name] += 1.0
                self.longest_wait_s = max(self.longest_wait_s, self._waits[name])
