"""The planner: snapshot in, plan out. Pure, deterministic, without clock or input/output.

1. Gangs, by strict priority, then first come first served, unless one has waited too long (see `gang_order`). A
   request is granted when all its devices are free or run rollouts, which then shrink. A request that does not fit
   keeps its devices away from every later request (no overtaking, hence no starvation among gangs), while rollouts go
   on there: nothing is stopped before the gang fits. A gang that may run elsewhere, or on fewer devices, does so where
   that costs less (see `GangChoice`).
2. Rollouts divide what remains, as the policy says.
"""

from collections.abc import Callable
from operator import attrgetter

from rlix.protocol.messages import Demand, Lease, LeaseState, LeaseStatus
from rlix.protocol.types import Phase
from rlix.scheduler.exchanges import circles
from rlix.scheduler.gang_choice import GangChoice
from rlix.scheduler.gang_order import gang_order
from rlix.scheduler.plan import Expand, GangGrant, Plan, Shrink
from rlix.scheduler.policies.base import Holding, Policy, Pool
from rlix.scheduler.policies.proportional import proportional
from rlix.scheduler.snapshot import RolloutState, Snapshot

_EPOCH: Callable[[LeaseStatus], int] = attrgetter("lease.epoch")


def plan(snapshot: Snapshot, policy: Policy = proportional) -> Plan:
    """Decide one cycle. Every change of one cycle is in one plan, however many there are."""
    pool_ids = {device.id for device in snapshot.devices}
    free = set(pool_ids)
    running: dict[int, Lease] = {}  # device -> the preemptible lease on it
    pinned: list[Lease] = []
    working: set[int] = set()  # devices of gangs
    for status in sorted(snapshot.leases, key=_EPOCH):
        lease = status.lease
        free.difference_update(lease.devices)
        if lease.phase is not Phase.ROLLOUT:
            working.update(lease.devices)
            continue
        if status.state is LeaseState.ACTIVE:
            for device in lease.devices:
                if device in pool_ids:
                    running[device] = lease
        elif status.state is LeaseState.PENDING:
            pinned.append(lease)

    shrunk: dict[int, Lease] = {}
    grants, reserved, imminent = _grant_gangs(snapshot, pool_ids, free, running, shrunk, working)
    pool = _pool(snapshot.rollouts, free, running, pinned, reserved, imminent)
    expands = []
    for expand, devices in _divided(pool, policy):
        for device in devices:
            if device in running:
                lease = running[device]
                shrunk[lease.epoch] = lease
        expands.append(expand)
    return Plan(tuple(Shrink(epoch) for epoch in sorted(shrunk)), tuple(grants), tuple(expands))


def _grant_gangs(
    snapshot: Snapshot,
    pool_ids: set[int],
    free: set[int],
    running: dict[int, Lease],
    shrunk: dict[int, Lease],
    working: set[int],
) -> tuple[list[GangGrant], set[int], set[int]]:
    """Serve the gangs; updates `free`, `running`, `shrunk` and `working`, the devices of gangs.

    Returns the grants, the reserved devices and the imminent ones (see `Pool`).
    """
    grants: list[GangGrant] = []
    reserved: set[int] = set()
    imminent: set[int] = set()
    choice = GangChoice(snapshot, free, running, reserved)
    for request in gang_order(snapshot):
        choices = [devices for devices in request.choices if pool_ids.issuperset(devices)]
        if not choices:
            continue  # names a device that left the pool: it cannot run, so it must not block others either
        devices = choice.chosen(request, choices)
        if devices is None:
            if reserved.isdisjoint(choices[0]) and working.isdisjoint(choices[0]):
                imminent.update(choices[0])
            reserved.update(choices[0])
            continue
        for device in devices:
            if device in running:
                lease = running[device]
                shrunk[lease.epoch] = lease
                for vacated in lease.devices:
                    if running.pop(vacated, None) is not None:
                        free.add(vacated)
        free.difference_update(devices)
        working.update(devices)
        grants.append(GangGrant(request.id, devices))
    return grants, reserved, imminent


def _pool(
    rollouts: tuple[RolloutState, ...],
    free: set[int],
    running: dict[int, Lease],
    pinned: list[Lease],
    reserved: set[int],
    imminent: set[int],
) -> Pool:
    """What the policy sees. A running lease whose rollout is not in the snapshot counts as one without demand."""
    known = sorted(rollouts, key=lambda r: (r.pipeline_id, r.cluster))
    index = {(r.pipeline_id, r.cluster): i for i, r in enumerate(known)}
    holdings: list[Holding] = []
    owner: dict[int, int] = {}
    last: Lease | None = None
    for device, lease in running.items():  # the devices of a lease follow each other
        if lease is not last:
            last = lease
            key = (lease.pipeline_id, lease.cluster)
            if key not in index:
                index[key] = len(known)
                known.append(RolloutState(lease.pipeline_id, lease.cluster, (), Demand(0)))
            holdings.append(Holding(lease.epoch, index[key], lease.bundle or 0, lease.devices))
        owner[device] = len(holdings) - 1
    counts = [0] * len(known)
    for lease in pinned:
        at = index.get((lease.pipeline_id, lease.cluster))
        if at is not None:
            counts[at] += 1
    return Pool(known, holdings, free, owner, counts, reserved, imminent)


def _divided(pool: Pool, policy: Policy) -> list[tuple[Expand, tuple[int, ...]]]:
    """The policy's expands with their devices, without those that name a bundle which is held already, and without
    those that only pass equal bundles round."""
    bundles = {(r.pipeline_id, r.cluster): (i, r.bundles) for i, r in enumerate(pool.rollouts)}
    changes = []
    takes: dict[int, tuple[int, int]] = {}  # holding that passes on whole -> (who has it, who is to have it)
    for expand in policy.divide(pool):
        rollout, choices = bundles[(expand.pipeline_id, expand.cluster)]
        devices = choices[expand.bundle]
        at = pool.owner.get(devices[0])
        if at is not None:
            holding = pool.holdings[at]
            if holding.rollout == rollout and holding.bundle == expand.bundle:
                continue
            if holding.devices == devices:
                takes[at] = holding.rollout, rollout
        changes.append((expand, devices))
    left_out = {pool.holdings[at].devices for at in circles(takes)}
    return [change for change in changes if change[1] not in left_out] if left_out else changes
