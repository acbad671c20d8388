"""The one place where a plan becomes events, for the live pool and for the simulator."""

from rlix.protocol.events import DrainStarted, Event, LeaseGranted
from rlix.protocol.messages import Lease
from rlix.protocol.types import Phase
from rlix.scheduler.plan import Plan
from rlix.scheduler.planner import plan
from rlix.scheduler.policies.base import Policy
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State
from rlix.scheduler.validate import check


def decide(snapshot: Snapshot, state: State, policy: Policy, *, check_plan: bool = True) -> tuple[Event, ...]:
    """One cycle: the events that carry out the plan for `snapshot`, in the order in which they are to be applied.

    `state` is what the snapshot was taken of, and gives the epochs; it is not changed. `check_plan` False skips the
    independent check, for simulations that check a sample of their plans.

    Raises:
        PlanError: the plan breaks a rule; nothing of it may be carried out.
    """
    decided = plan(snapshot, policy)
    if check_plan:
        check(snapshot, decided)
    return events_of(snapshot, decided, state.next_epoch)


def events_of(snapshot: Snapshot, decided: Plan, epoch: int) -> tuple[Event, ...]:
    """The plan's shrinks, then its grants and expands, whose leases get epochs from `epoch` on."""
    if not decided:
        return ()
    events: list[Event] = [DrainStarted(shrink.epoch) for shrink in decided.shrinks]
    requests = {request.id: request for request in snapshot.requests}
    bundles = {(rollout.pipeline_id, rollout.cluster): rollout.bundles for rollout in snapshot.rollouts}
    for grant in decided.grants:
        request = requests[grant.request_id]
        lease = Lease(
            epoch,
            request.pipeline_id,
            request.cluster,
            request.phase,
            grant.devices,
            key=request.key,
            holder=request.holder,
            longest_s=request.longest_s,
        )
        events.append(LeaseGranted(lease, grant.request_id))
        epoch += 1
    for expand in decided.expands:
        devices = bundles[expand.pipeline_id, expand.cluster][expand.bundle]
        lease = Lease(epoch, expand.pipeline_id, expand.cluster, Phase.ROLLOUT, devices, expand.bundle)
        events.append(LeaseGranted(lease))
        epoch += 1
    return tuple(events)
