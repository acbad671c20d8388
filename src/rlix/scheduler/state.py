"""What the control plane knows, as a fold over its events. `State.apply` is the only thing that changes it."""

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatchmethod

from rlix.protocol.errors import PipelineGoneError
from rlix.protocol.events import (
    CountersKept,
    DemandReported,
    DevicesDiscovered,
    DevicesReleased,
    DrainStarted,
    Event,
    GangCancelled,
    GangRequested,
    GrantRevoked,
    HoldersNamed,
    LeaseGranted,
    LeaseKept,
    LeaseQuarantined,
    LeaseReleased,
    NodesCordoned,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineEnding,
    PipelineRegistered,
    PipelineUnregistered,
)
from rlix.protocol.messages import (
    Cluster,
    Lease,
    LeaseState,
    LeaseStatus,
    ReleaseReason,
)
from rlix.protocol.types import Phase
from rlix.scheduler.account import REMEMBERED_S, Account
from rlix.scheduler.known import Known, StateError, check_cluster
from rlix.scheduler.snapshot import Bundles


class State(Known):
    """Validates every event before it takes effect. Not thread-safe: one writer."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Callable[[Event], tuple[Lease, ...]] = self._apply  # to bind it costs more than an event

    # -- changing ------------------------------------------------------------------------------------------------

    def apply(self, event: Event, now: float) -> tuple[Lease, ...]:
        """Take the event of the moment `now` (seconds of any clock that never goes back) into account.

        Returns the leases that became active by it, by epoch.
        Raises StateError (or PipelineGoneError) and changes nothing when the event contradicts what is known.
        """
        self._now = now
        return self._handle(event)

    @singledispatchmethod
    def _apply(self, event: object) -> tuple[Lease, ...]:
        raise TypeError(f"not an event of the control plane: {event!r}")

    @_apply.register
    def _(self, event: DevicesDiscovered) -> tuple[Lease, ...]:
        """The whole pool as it is now; leases on devices that left stay until they are released."""
        devices = {device.id: device for device in event.devices}
        if len(devices) != len(event.devices):
            raise StateError("the discovered devices contain an id twice; number them 0..N-1 over all nodes")
        came = devices.keys() - self._devices.keys()
        self._devices, self._draining = devices, frozenset(event.draining)
        self._discovered = tuple(devices.values())
        self.next_device_id = max(self.next_device_id - 1, *devices, -1) + 1
        if came and self._registrations:
            self._offer(came)
        return ()

    @_apply.register
    def _(self, event: NodesCordoned) -> tuple[Lease, ...]:
        self._cordoned = event.nodes
        return ()

    @_apply.register
    def _(self, event: PipelineAllocated) -> tuple[Lease, ...]:
        if event.pipeline_id in self._allocated:
            raise StateError(f"pipeline id {event.pipeline_id!r} is already allocated")
        self._allocated[event.pipeline_id] = event.kind
        self.next_pipeline += 1
        return ()

    @_apply.register
    def _(self, event: PipelineRegistered) -> tuple[Lease, ...]:
        registration = event.registration
        if registration.pipeline_id in self._registrations:
            raise StateError(f"pipeline {registration.pipeline_id!r} is already registered; unregister it first")
        names = [cluster.name for cluster in registration.clusters]
        if len(set(names)) != len(names):
            raise StateError(f"pipeline {registration.pipeline_id!r} registers a cluster name twice: {sorted(names)}")
        for cluster in registration.clusters:
            check_cluster(registration.pipeline_id, cluster)
        self._registrations[registration.pipeline_id] = registration
        return ()

    @_apply.register
    def _(self, event: PipelineAdmitted) -> tuple[Lease, ...]:
        self._registration(event.pipeline_id)
        self._admitted.add(event.pipeline_id)
        self._account(event.pipeline_id)
        for key, rollout in self._rollouts.items():
            if key[0] == event.pipeline_id:
                rollout.admit(self._now)
                rollout.join(self._planned_for(), self._now)
        return ()

    @_apply.register
    def _(self, event: HoldersNamed) -> tuple[Lease, ...]:
        self._registration(event.pipeline_id)
        self._holders.setdefault((event.pipeline_id, event.cluster), {}).update(dict(event.processes))
        return ()

    @_apply.register
    def _(self, event: PipelineEnding) -> tuple[Lease, ...]:
        """Requests and grants that are not active yet go at once; what is held stays until it is given back."""
        pipeline_id = event.pipeline_id
        self._registration(pipeline_id)
        self._ending.setdefault(pipeline_id, event.reason)
        if event.spare is not None:
            self._spared[pipeline_id] = event.spare
        self._admitted.discard(pipeline_id)
        for request_id in [r.id for r in self._requests.values() if r.pipeline_id == pipeline_id]:
            del self._requests[request_id]
        for status in self.leases_of(pipeline_id):
            if status.state is LeaseState.PENDING:
                self._remove(status.lease.epoch)
            elif status.state is LeaseState.ACTIVE:
                self._drain(status, event.reason)
        return ()

    @_apply.register
    def _(self, event: PipelineUnregistered) -> tuple[Lease, ...]:
        pipeline_id = event.pipeline_id
        if pipeline_id not in self._registrations and pipeline_id not in self._allocated:
            raise PipelineGoneError(f"pipeline {pipeline_id!r} is not registered")
        if pipeline_id in self._leases_of:
            raise StateError(f"pipeline {pipeline_id!r} still holds leases {sorted(self._leases_of[pipeline_id])}")
        self._allocated.pop(pipeline_id, None)
        self._registrations.pop(pipeline_id, None)
        self._admitted.discard(pipeline_id)
        self._ending.pop(pipeline_id, None)
        self._given.pop(pipeline_id, None)
        self._spared.pop(pipeline_id, None)
        for request_id in [r.id for r in self._requests.values() if r.pipeline_id == pipeline_id]:
            del self._requests[request_id]
        for of_cluster in (self._rollouts, self._last_on, self._holders):
            for key in [key for key in of_cluster if key[0] == pipeline_id]:
                del of_cluster[key]
        self._gang_work = {key: work for key, work in self._gang_work.items() if key[0] != pipeline_id}
        return ()

    @_apply.register
    def _(self, event: CountersKept) -> tuple[Lease, ...]:
        self.next_epoch = max(self.next_epoch, event.last_epoch + 1)
        self.next_request_id = max(self.next_request_id, event.last_request + 1)
        self.next_device_id = max(self.next_device_id, event.last_device + 1)
        self.next_pipeline = max(self.next_pipeline, event.allocated + 1)
        return ()

    @_apply.register
    def _(self, event: GangRequested) -> tuple[Lease, ...]:
        cluster = self._cluster(event.pipeline_id, event.cluster)
        if event.request_id < self.next_request_id:
            raise StateError(f"request id {event.request_id} does not grow; the next one is {self.next_request_id}")
        if event.phase.preemptible:
            raise StateError(f"{event.phase.name} asks for no gang; report demand for cluster {event.cluster!r}")
        if event.exact and not cluster.has(event.first):
            raise StateError(f"cluster {event.cluster!r} has no devices {event.first}; it has {cluster.choices}")
        self.next_request_id = event.request_id + 1
        self._requests[event.request_id] = self._placed(event, cluster)
        return ()

    @_apply.register
    def _(self, event: GangCancelled) -> tuple[Lease, ...]:
        if event.request_id not in self._requests:
            raise StateError(f"gang request {event.request_id} is not waiting, so it cannot be cancelled")
        del self._requests[event.request_id]
        return ()

    @_apply.register
    def _(self, event: DemandReported) -> tuple[Lease, ...]:
        cluster = self._cluster(event.pipeline_id, event.cluster)
        if event.demand.trajectories < 0 or event.demand.tokens < 0:
            raise StateError(f"demand of pipeline {event.pipeline_id!r} is negative: {event.demand}")
        rollout = self._rollout(event.pipeline_id, cluster)
        if event.demand.trajectories and not rollout.demand.trajectories:
            rollout.join(self._planned_for(), self._now, REMEMBERED_S)
        rollout.report(event.demand, self._now)
        return ()

    @_apply.register
    def _(self, event: LeaseGranted) -> tuple[Lease, ...]:
        lease = event.lease
        cluster = self._cluster(lease.pipeline_id, lease.cluster)
        if lease.pipeline_id not in self._admitted:
            raise StateError(f"pipeline {lease.pipeline_id!r} is not admitted, so it gets no lease")
        if lease.epoch < self.next_epoch:
            raise StateError(f"epoch {lease.epoch} does not grow; the next one is {self.next_epoch}")
        if lease.phase is Phase.ROLLOUT:
            self._check_bundle(lease, event.request_id)
        else:
            self._check_gang(lease, event.request_id)
        free = True
        for device in lease.devices:
            self._check_grantable(lease, device)
            free = free and device not in self._holder
        self.next_epoch = lease.epoch + 1
        if event.request_id is not None:
            request = self._requests.pop(event.request_id)
            if not free:
                self._answered[lease.epoch] = request
            if lease.devices != request.devices:
                self._moves[lease.epoch] = request.move_s
            self._moved(lease, cluster)
        self._keep(LeaseStatus(lease, LeaseState.ACTIVE if free else LeaseState.PENDING))
        return (lease,) if free else ()

    @_apply.register
    def _(self, event: LeaseKept) -> tuple[Lease, ...]:
        status = event.status
        lease = status.lease
        cluster = self._cluster(lease.pipeline_id, lease.cluster)
        self.next_epoch = max(self.next_epoch, lease.epoch + 1)
        if event.answers is not None:
            self._answered[lease.epoch] = self._placed(event.answers, cluster)
        elif lease.phase is not Phase.ROLLOUT:
            self._moved(lease, cluster)
        self._keep(status)
        return (lease,) if status.state is LeaseState.ACTIVE else ()

    def _keep(self, status: LeaseStatus) -> None:
        """Take the lease up, on its devices or as the one that comes next there."""
        lease = status.lease
        self._leases[lease.epoch] = status
        self._leases_of.setdefault(lease.pipeline_id, set()).add(lease.epoch)
        on = self._successor if status.state is LeaseState.PENDING else self._holder
        for device in lease.devices:
            on[device] = lease.epoch
        if on is self._holder:
            self._account(lease.pipeline_id).change(len(lease.devices), self._now)
        if lease.phase is Phase.ROLLOUT and status.state in (LeaseState.ACTIVE, LeaseState.PENDING):
            rollout = self._rollout(lease.pipeline_id, self._cluster(lease.pipeline_id, lease.cluster))
            rollout.grant(lease.epoch, self._now)
        elif status.state is LeaseState.ACTIVE:
            self._gang_since[lease.epoch] = self._now

    def _check_gang(self, lease: Lease, request_id: int | None) -> None:
        request = None if request_id is None else self._requests.get(request_id)
        if request is None:
            raise StateError(f"gang lease {lease.epoch} answers request {request_id}, which is not waiting")
        asked = (request.pipeline_id, request.cluster, request.phase, None)
        given = (lease.pipeline_id, lease.cluster, lease.phase, lease.bundle)
        if asked != given or lease.devices not in request.choices:
            raise StateError(f"{lease} is not what request {request_id} asked for: {request}")

    def _check_bundle(self, lease: Lease, request_id: int | None) -> None:
        rollout = self._rollout(lease.pipeline_id, self._cluster(lease.pipeline_id, lease.cluster))
        if request_id is not None:
            raise StateError(f"rollout lease {lease.epoch} answers request {request_id}; only gangs are asked for")
        if lease.bundle is None or not 0 <= lease.bundle < len(rollout.bundles):
            raise StateError(f"rollout lease {lease.epoch} names bundle {lease.bundle} of {len(rollout.bundles)}")
        if rollout.bundles[lease.bundle] != lease.devices:
            raise StateError(f"rollout lease {lease.epoch}: bundle {lease.bundle} is not devices {lease.devices}")

    def _check_grantable(self, lease: Lease, device: int) -> None:
        if not self.is_lent(device):
            raise StateError(f"lease {lease.epoch} names device {device}, which is not in the pool")
        if device in self._successor:
            raise StateError(f"device {device} is promised to lease {self._successor[device]}, not to {lease.epoch}")
        holder = self._holder.get(device)
        if holder is not None and self._leases[holder].state is not LeaseState.DRAINING:
            raise StateError(f"device {device} belongs to lease {holder}; shrink it before granting {lease.epoch}")

    @_apply.register
    def _(self, event: DrainStarted) -> tuple[Lease, ...]:
        status = self._status(event.epoch)
        if status.state is not LeaseState.ACTIVE:
            raise StateError(f"only an active lease can drain, not {status}")
        self._drain(status, event.reason)
        return ()

    def _drain(self, status: LeaseStatus, reason: str) -> None:
        self._leases[status.lease.epoch] = replace(status, state=LeaseState.DRAINING, reason=reason)
        if status.lease.phase is Phase.ROLLOUT:
            self._leave_rollout(status.lease)

    @_apply.register
    def _(self, event: GrantRevoked) -> tuple[Lease, ...]:
        status = self._status(event.epoch)
        if status.state is not LeaseState.PENDING:
            raise StateError(f"only a pending lease can be revoked, not {status}")
        request = self._answered.get(event.epoch)
        self._remove(event.epoch)
        if request is not None:
            self._requests[request.id] = request
        return ()

    @_apply.register
    def _(self, event: LeaseQuarantined) -> tuple[Lease, ...]:
        status = self._status(event.epoch)
        if status.state is LeaseState.PENDING:
            raise StateError(f"a pending lease has nothing on its devices that could be quarantined: {status}")
        promised = sorted({self._successor[d] for d in status.lease.devices if d in self._successor})
        if promised:
            raise StateError(f"lease {event.epoch} cannot be quarantined: leases {promised} wait for it; revoke them")
        if status.state is LeaseState.ACTIVE:
            self._drain(status, event.reason)
        self._leases[event.epoch] = replace(status, state=LeaseState.QUARANTINED, reason=event.reason)
        return ()

    @_apply.register
    def _(self, event: LeaseReleased) -> tuple[Lease, ...]:
        lease = self._status(event.epoch).lease
        if event.reason is ReleaseReason.RELEASED and event.epoch in self._gang_since:
            took_s = max(0.0, self._now - self._gang_since[event.epoch] - self._moves.get(event.epoch, 0.0))
            self._gang_work[lease.pipeline_id, lease.cluster, lease.phase] = took_s * len(lease.devices)
        return self._activate(self._remove(event.epoch))

    @_apply.register
    def _(self, event: DevicesReleased) -> tuple[Lease, ...]:
        """Nobody waits for them as a successor: of a lease that drains no part is given back."""
        status, given = self._status(event.epoch), set(event.devices)
        lease = status.lease
        kept = tuple(device for device in lease.devices if device not in given)
        if event.epoch not in self._gang_since or status.state is not LeaseState.ACTIVE:
            raise StateError(f"only an active gang's lease gives a part of its devices back, not {status}")
        if not kept or not given or len(kept) + len(event.devices) != len(lease.devices):
            raise StateError(f"{event.devices} are not a part of the devices of {lease}")
        self._leases[event.epoch] = replace(status, lease=replace(lease, devices=kept))
        for device in event.devices:
            del self._holder[device]
        self._account(lease.pipeline_id).change(-len(event.devices), self._now)
        # What it did so far is as if it had begun earlier, on those that it keeps.
        took_s = self._now - self._gang_since[event.epoch]
        self._gang_since[event.epoch] = self._now - took_s * len(lease.devices) / len(kept)
        return ()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _moved(self, lease: Lease, cluster: Cluster) -> None:
        """A gang with alternatives is where `lease` says from now on, and its pipeline's rollouts know it."""
        if not cluster.alternatives or lease.devices not in cluster.choices:  # but for who asked for a part of them
            return
        self._last_on[(lease.pipeline_id, lease.cluster)] = lease.devices
        for (pipeline_id, _), rollout in self._rollouts.items():
            if pipeline_id == lease.pipeline_id:
                rollout.gang_devices = self._gang_devices(pipeline_id)

    def _remove(self, epoch: int) -> tuple[int, ...]:
        """Forget the lease; returns the devices it held."""
        status = self._leases.pop(epoch)
        for of_epoch in (self._answered, self._gang_since, self._moves):
            of_epoch.pop(epoch, None)
        lease = status.lease
        self._leases_of[lease.pipeline_id].discard(epoch)
        if not self._leases_of[lease.pipeline_id]:
            del self._leases_of[lease.pipeline_id]
        pending = status.state is LeaseState.PENDING
        on = self._successor if pending else self._holder
        for device in lease.devices:
            del on[device]
        if not pending:
            self._account(lease.pipeline_id).change(-len(lease.devices), self._now)
        if lease.phase is Phase.ROLLOUT:
            self._leave_rollout(lease)
        return () if pending else lease.devices

    def _activate(self, freed: set[int] | tuple[int, ...]) -> tuple[Lease, ...]:
        """Make those pending leases active that waited for `freed` and now have all their devices."""
        active = []
        for epoch in sorted({self._successor[device] for device in freed if device in self._successor}):
            status = self._leases[epoch]
            if any(device in self._holder for device in status.lease.devices):
                continue
            for device in status.lease.devices:
                del self._successor[device]
                self._holder[device] = epoch
            self._account(status.lease.pipeline_id).change(len(status.lease.devices), self._now)
            self._leases[epoch] = replace(status, state=LeaseState.ACTIVE)
            if status.lease.phase is not Phase.ROLLOUT:
                self._gang_since[epoch] = self._now
            active.append(status.lease)
        return tuple(active)

    def _rollout(self, pipeline_id: str, cluster: Cluster) -> Account:
        key = (pipeline_id, cluster.name)
        rollout = self._rollouts.get(key)
        if rollout is None:
            bundles = Bundles(cluster.bundles)
            bundles = self._bundles.setdefault(bundles, bundles)
            rollout = self._rollouts[key] = Account(bundles, self._gang_devices(pipeline_id))
            rollout.join(self._planned_for(), self._now)
        return rollout

    def _leave_rollout(self, lease: Lease) -> None:
        rollout = self._rollout(lease.pipeline_id, self._cluster(lease.pipeline_id, lease.cluster))
        rollout.leave(lease.epoch, self._now)
