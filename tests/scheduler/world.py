"""A pool for the scheduler's tests: builders, and plans carried out event by event as the control plane does."""

import random
from collections.abc import Sequence
from typing import TypeVar

from rlix.protocol.events import (
    DemandReported,
    DevicesDiscovered,
    GangRequested,
    LeaseGranted,
    LeaseReleased,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineRegistered,
    ShrinkStarted,
)
from rlix.protocol.messages import (
    Cluster,
    Demand,
    Device,
    DeviceKind,
    Lease,
    LeaseState,
    LeaseStatus,
    Registration,
    ReleaseReason,
)
from rlix.protocol.types import Phase
from rlix.scheduler.plan import Plan
from rlix.scheduler.planner import plan
from rlix.scheduler.policies.base import Policy
from rlix.scheduler.policies.proportional import proportional
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State
from rlix.scheduler.validate import check

INFER = "actor_infer"
TRAIN = "actor_train"


def devices(count: int, first: int = 0) -> tuple[Device, ...]:
    return tuple(Device(i, f"node{i // 8}", "127.0.0.1", i % 8, DeviceKind.CPU) for i in range(first, first + count))


class World:
    """A State whose plans are validated and applied; shrinks stay unacknowledged until `acknowledge` is called."""

    def __init__(self, count: int, policy: Policy = proportional) -> None:
        self.state = State()
        self.policy = policy
        self.state.apply(DevicesDiscovered(devices(count)))

    def register(
        self,
        name: str,
        infer: Sequence[int],
        train: Sequence[int] = (),
        size: int = 1,
        alternatives: Sequence[Sequence[int]] = (),
    ) -> None:
        clusters = [Cluster(INFER, size, tuple(infer), elastic=True)]
        if train:
            clusters.append(Cluster(TRAIN, 1, tuple(train), tuple(map(tuple, alternatives))))
        self.state.apply(PipelineAllocated(name, "ft"))
        self.state.apply(PipelineRegistered(Registration(name, f"pipeline_{name}_NS", tuple(clusters))))
        self.state.apply(PipelineAdmitted(name))

    def demand(self, name: str, trajectories: int) -> None:
        self.state.apply(DemandReported(name, INFER, Demand(trajectories)))

    def request(self, name: str, phase: Phase = Phase.ACTOR_TRAINING, cluster: str = TRAIN) -> int:
        request_id = self.state.next_request_id
        self.state.apply(GangRequested(request_id, name, cluster, phase))
        return request_id

    def cycle(self) -> Plan:
        """Plan, validate and apply one cycle."""
        snapshot = self.state.snapshot()
        changes = plan(snapshot, self.policy)
        check(snapshot, changes)
        self.apply(snapshot, changes)
        return changes

    def apply(self, snapshot: Snapshot, changes: Plan) -> None:
        requests = {r.id: r for r in snapshot.requests}
        bundles = {(r.pipeline_id, r.cluster): r.bundles for r in snapshot.rollouts}
        for shrink in changes.shrinks:
            self.state.apply(ShrinkStarted(shrink.epoch))
        for grant in changes.grants:
            r = requests[grant.request_id]
            lease = Lease(self.state.next_epoch, r.pipeline_id, r.cluster, r.phase, grant.devices)
            self.state.apply(LeaseGranted(lease, r.id))
        for e in changes.expands:
            held = bundles[(e.pipeline_id, e.cluster)][e.bundle]
            lease = Lease(self.state.next_epoch, e.pipeline_id, e.cluster, Phase.ROLLOUT, held, e.bundle)
            self.state.apply(LeaseGranted(lease))

    def acknowledge(self, reason: ReleaseReason = ReleaseReason.SHRUNK) -> None:
        for status in self.leases(LeaseState.DRAINING):
            self.state.apply(LeaseReleased(status.lease.epoch, reason))

    def settle(self, limit: int = 12) -> None:
        """Cycle and acknowledge until nothing changes; fails when that takes more than `limit` cycles."""
        for _ in range(limit):
            self.acknowledge()
            if not self.cycle():
                return
        raise AssertionError(f"the plan still changes after {limit} cycles without any event")

    def release_gangs(self) -> None:
        for status in self.leases(LeaseState.ACTIVE):
            if status.lease.phase is not Phase.ROLLOUT:
                self.state.apply(LeaseReleased(status.lease.epoch, ReleaseReason.RELEASED))

    def leases(self, state: LeaseState) -> list[LeaseStatus]:
        return [status for status in self.state.leases.values() if status.state is state]

    def held(self) -> dict[str, list[int]]:
        """Rollout devices by pipeline, draining leases left out."""
        held: dict[str, list[int]] = {}
        for status in self.state.leases.values():
            if status.lease.phase is Phase.ROLLOUT and status.state is not LeaseState.DRAINING:
                held.setdefault(status.lease.pipeline_id, []).extend(status.lease.devices)
        return {name: sorted(ids) for name, ids in held.items()}

    def counts(self) -> dict[str, int]:
        return {name: len(ids) for name, ids in self.held().items()}


T = TypeVar("T")


def shuffled(snapshot: Snapshot, rng: random.Random) -> Snapshot:
    """The same pool with its collections in another order and its placements as other objects."""

    def mixed(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(rng.sample(items, len(items)))

    rollouts = tuple(
        type(r)(r.pipeline_id, r.cluster, tuple(tuple(b) for b in list(r.bundles)), r.demand, r.waited)
        for r in snapshot.rollouts
    )
    return Snapshot(mixed(snapshot.devices), mixed(snapshot.requests), mixed(rollouts), mixed(snapshot.leases))
