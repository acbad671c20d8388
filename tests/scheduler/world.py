"""A pool for the scheduler's tests: builders, and plans carried out event by event as the control plane does."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from rlix.protocol.events import (
    DemandReported,
    DevicesDiscovered,
    Event,
    GangRequested,
    LeaseReleased,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineRegistered,
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
from rlix.scheduler.commit import decide
from rlix.scheduler.plan import Plan
from rlix.scheduler.planner import plan
from rlix.scheduler.policies.base import Policy
from rlix.scheduler.policies.proportional import proportional
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State

INFER = "actor_infer"
TRAIN = "actor_train"


def devices(count: int, first: int = 0) -> tuple[Device, ...]:
    return tuple(Device(i, f"node{i // 8}", "127.0.0.1", i % 8, DeviceKind.CPU) for i in range(first, first + count))


class World:
    """A State whose plans are validated and applied; shrinks stay unacknowledged until `acknowledge` is called.

    Time passes when a test adds to `now`.
    """

    def __init__(self, count: int, policy: Policy = proportional) -> None:
        self.state = State()
        self.policy = policy
        self.now = 0.0
        self.apply(DevicesDiscovered(devices(count)))

    def apply(self, event: Event) -> tuple[Lease, ...]:
        return self.state.apply(event, self.now)

    def snapshot(self) -> Snapshot:
        return self.state.snapshot(self.now)

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
        self.apply(PipelineAllocated(name, "ft"))
        self.apply(PipelineRegistered(Registration(name, f"pipeline_{name}_NS", tuple(clusters))))
        self.apply(PipelineAdmitted(name))

    def demand(self, name: str, trajectories: int) -> None:
        self.apply(DemandReported(name, INFER, Demand(trajectories)))

    def request(
        self, name: str, phase: Phase = Phase.ACTOR_TRAINING, cluster: str = TRAIN, exactly: tuple[int, ...] = ()
    ) -> int:
        request_id = self.state.next_request_id
        self.apply(GangRequested(request_id, name, cluster, phase, first=exactly, exact=bool(exactly)))
        return request_id

    def cycle(self) -> Plan:
        """Plan, validate and apply one cycle."""
        snapshot = self.snapshot()
        for event in decide(snapshot, self.state, self.policy):
            self.apply(event)
        return plan(snapshot, self.policy)

    def acknowledge(self, reason: ReleaseReason = ReleaseReason.SHRUNK) -> None:
        for status in self.leases(LeaseState.DRAINING):
            self.apply(LeaseReleased(status.lease.epoch, reason))

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
                self.apply(LeaseReleased(status.lease.epoch, ReleaseReason.RELEASED))

    def leases(self, state: LeaseState) -> list[LeaseStatus]:
        return [status for status in self.state.leases.values() if status.state is state]

    def held(self) -> dict[str, list[int]]:
        """Rollout devices by pipeline; leases on their way out, and quarantined ones, serve nobody and are left out."""
        held: dict[str, list[int]] = {}
        for status in self.state.leases.values():
            serves = status.state in (LeaseState.PENDING, LeaseState.ACTIVE)
            if status.lease.phase is Phase.ROLLOUT and serves:
                held.setdefault(status.lease.pipeline_id, []).extend(status.lease.devices)
        return {name: sorted(ids) for name, ids in held.items()}

    def counts(self) -> dict[str, int]:
        return {name: len(ids) for name, ids in self.held().items()}


T = TypeVar("T")


def shuffled(snapshot: Snapshot, rng: random.Random) -> Snapshot:
    """The same pool with its collections in another order and its placements as other objects."""

    def mixed(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(rng.sample(items, len(items)))

    rollouts = tuple(replace(r, bundles=tuple(tuple(b) for b in list(r.bundles))) for r in snapshot.rollouts)
    return replace(
        snapshot,
        devices=mixed(snapshot.devices),
        requests=mixed(snapshot.requests),
        rollouts=mixed(rollouts),
        leases=mixed(snapshot.leases),
    )
