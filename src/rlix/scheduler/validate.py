"""An independent check of plans. It shares no code with the planner and knows nothing of policies.

It replays the rules over the snapshot with one table: who has each device now, and who will.
"""

from rlix.protocol.errors import PlanError
from rlix.protocol.messages import LeaseState, LeaseStatus
from rlix.protocol.types import Phase
from rlix.scheduler.plan import Expand, Plan
from rlix.scheduler.snapshot import GANG_PATIENCE_S, GangRequest, RolloutState, Snapshot


def check(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PlanError, naming the change and the rule, unless `plan` keeps every rule in `snapshot`.

    Rules: only active rollout leases shrink, once each, and only for a grant or expand of this plan that completes;
    a gang gets exactly its devices, or one of its alternatives, all at once, in strict priority and then arrival order
    (who has waited for `GANG_PATIENCE_S` goes before the phase: by what its job was given, later by arrival),
    with no overtaking on the devices a request waits for and no waiting once they fit; an expand is an unheld bundle of
    a rollout with demand; nobody gets a device that is not in the pool, is taken, drains or is promised, and no device
    is given twice; no bundles of one size only go round in a circle.
    """
    statuses = {status.lease.epoch: status for status in snapshot.leases}
    if len(statuses) != len(snapshot.leases):
        raise PlanError("the snapshot holds two leases of one epoch")
    shrunk = _check_shrinks(statuses, plan)
    blocked_by = _blocking(snapshot, shrunk)
    given = _check_grants(snapshot, plan, blocked_by)
    _check_expands(snapshot, plan, blocked_by, given)
    for epoch in shrunk:
        if given.isdisjoint(statuses[epoch].lease.devices):
            raise PlanError(f"lease {epoch} is shrunk for nothing: no grant or expand of this plan uses its devices")
    _check_nothing_goes_round(statuses, snapshot, plan, shrunk)
    _check_gang_order(snapshot, plan)


def _check_nothing_goes_round(
    statuses: dict[int, LeaseStatus], snapshot: Snapshot, plan: Plan, shrunk: set[int]
) -> None:
    """Strike off, again and again, whoever only gives or only takes a bundle: who is left passes them round."""
    bundles = {(rollout.pipeline_id, rollout.cluster): rollout.bundles for rollout in snapshot.rollouts}
    takers = {bundles[e.pipeline_id, e.cluster][e.bundle]: (e.pipeline_id, e.cluster) for e in plan.expands}
    passes = {
        ((lease.pipeline_id, lease.cluster), takers[lease.devices])
        for lease in (statuses[epoch].lease for epoch in shrunk)
        if lease.devices in takers
    }
    while passes:
        both = {giver for giver, _ in passes} & {taker for _, taker in passes}
        left = {(giver, taker) for giver, taker in passes if giver in both and taker in both}
        if left == passes:
            names = ", ".join(sorted({giver[0] for giver, _ in passes}))
            raise PlanError(f"bundles are passed round and leave everybody with as many as before: {names}")
        passes = left


def _check_shrinks(statuses: dict[int, LeaseStatus], plan: Plan) -> set[int]:
    shrunk: set[int] = set()
    for shrink in plan.shrinks:
        status = statuses.get(shrink.epoch)
        if status is None:
            raise PlanError(f"shrink of lease {shrink.epoch}, which nobody holds")
        if shrink.epoch in shrunk:
            raise PlanError(f"lease {shrink.epoch} is shrunk twice")
        if status.lease.phase is not Phase.ROLLOUT or status.state is not LeaseState.ACTIVE:
            raise PlanError(
                f"shrink of lease {shrink.epoch} ({status.lease.phase.name}, {status.state}); "
                "only active rollout leases may shrink"
            )
        shrunk.add(shrink.epoch)
    return shrunk


def _blocking(snapshot: Snapshot, shrunk: set[int]) -> dict[int, int]:
    """Device -> epoch of the lease that keeps this plan from giving it away."""
    return {
        device: status.lease.epoch
        for status in snapshot.leases
        if status.lease.epoch not in shrunk
        for device in status.lease.devices
    }


def _give(devices: tuple[int, ...], what: str, pool: set[int], blocked_by: dict[int, int], given: set[int]) -> None:
    for device in devices:
        if device not in pool:
            raise PlanError(f"{what} names device {device}, which is not in the pool")
        if device in blocked_by:
            raise PlanError(f"{what} names device {device}, which lease {blocked_by[device]} keeps")
        if device in given:
            raise PlanError(f"{what} names device {device}, which this plan has already given away")
        given.add(device)


def _check_grants(snapshot: Snapshot, plan: Plan, blocked_by: dict[int, int]) -> set[int]:
    requests = {request.id: request for request in snapshot.requests}
    pool = {device.id for device in snapshot.devices}
    given: set[int] = set()
    answered: set[int] = set()
    for grant in plan.grants:
        if grant.request_id not in requests:
            raise PlanError(f"grant to request {grant.request_id}, which does not wait")
        if grant.request_id in answered:
            raise PlanError(f"request {grant.request_id} is granted twice")
        answered.add(grant.request_id)
        request = requests[grant.request_id]
        if grant.devices not in request.choices:
            needs = " or ".join(map(str, request.choices))
            raise PlanError(f"grant to request {grant.request_id} gives {grant.devices}; the gang needs {needs}")
        _give(grant.devices, f"grant to request {grant.request_id}", pool, blocked_by, given)
    return given


def _check_expands(snapshot: Snapshot, plan: Plan, blocked_by: dict[int, int], given: set[int]) -> None:
    rollouts = {(rollout.pipeline_id, rollout.cluster): rollout for rollout in snapshot.rollouts}
    pool = {device.id for device in snapshot.devices}
    held = {
        (status.lease.pipeline_id, status.lease.cluster, status.lease.bundle)
        for status in snapshot.leases
        if status.lease.phase is Phase.ROLLOUT
    }
    for expand in plan.expands:
        rollout = rollouts.get((expand.pipeline_id, expand.cluster))
        what = f"expand of bundle {expand.bundle} of {expand.pipeline_id}/{expand.cluster}"
        if rollout is None:
            raise PlanError(f"{what}: no such rollout is admitted")
        _check_expand(expand, rollout, what)
        if (expand.pipeline_id, expand.cluster, expand.bundle) in held:
            raise PlanError(f"{what}: the bundle is held already, or drains")
        _give(rollout.bundles[expand.bundle], what, pool, blocked_by, given)


def _check_expand(expand: Expand, rollout: RolloutState, what: str) -> None:
    if not 0 <= expand.bundle < len(rollout.bundles):
        raise PlanError(f"{what}: the rollout has {len(rollout.bundles)} bundles")
    if rollout.demand.trajectories <= 0:
        raise PlanError(f"{what}: the rollout has no demand")


def _in_turn(snapshot: Snapshot) -> list[GangRequest]:
    """By phase and arrival; while somebody is late: who holds something, is very late, is late, and the rest."""
    by_phase = sorted(snapshot.requests, key=lambda r: (int(r.phase), r.id))
    waited_s = {request.id: snapshot.now - request.asked_at for request in by_phase}
    if max(waited_s.values(), default=0.0) < GANG_PATIENCE_S:
        return by_phase
    nested = [request for request in by_phase if request.holding]
    others = [request for request in by_phase if not request.holding]
    very_late = [request for request in others if waited_s[request.id] >= 2 * GANG_PATIENCE_S]
    late = [r for r in others if GANG_PATIENCE_S <= waited_s[r.id] < 2 * GANG_PATIENCE_S]
    very_late.sort(key=lambda request: request.id)
    late.sort(key=lambda request: (snapshot.given_gpu_s.get(request.pipeline_id, 0.0), request.id))
    return [*nested, *very_late, *late, *(r for r in others if waited_s[r.id] < GANG_PATIENCE_S)]


def _check_gang_order(snapshot: Snapshot, plan: Plan) -> None:
    """Walk the requests from the most urgent: each is either granted, or something it may not pass is in its way.

    What a waiting request claims is the first of its choices that the pool has; on the others it may be passed.
    """
    pool = {device.id for device in snapshot.devices}
    granted = {grant.request_id: grant.devices for grant in plan.grants}
    out_of_reach: set[int] = set()  # devices that no gang of this plan could have
    for status in snapshot.leases:
        if status.lease.phase is not Phase.ROLLOUT or status.state is not LeaseState.ACTIVE:
            out_of_reach.update(status.lease.devices)
    claimed: dict[int, GangRequest] = {}  # device -> the first request that was granted it or waits for it
    for request in _in_turn(snapshot):
        choices = [devices for devices in request.choices if pool.issuperset(devices)]
        if not choices:
            continue  # cannot be granted at all, so nobody has to wait for it
        claims = granted.get(request.id, choices[0])
        if request.id in granted:
            passed = [claimed[d].id for d in claims if d in claimed and claimed[d].id not in granted]
            if passed:
                raise PlanError(f"request {request.id} ({request.phase.name}) overtakes request {passed[0]}")
        elif claimed.keys().isdisjoint(claims) and out_of_reach.isdisjoint(claims):
            raise PlanError(f"request {request.id} ({request.phase.name}) fits and is left waiting")
        for device in claims:
            claimed.setdefault(device, request)
