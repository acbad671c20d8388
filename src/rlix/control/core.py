"""The control plane without Ray: what callers ask for, over the loop that looks, decides and acts."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace

from rlix.control.departures import Departures
from rlix.control.explain import can_run, left
from rlix.control.gang_queue import Asked, Ticket
from rlix.control.job import Departure
from rlix.control.knowledge import Knowledge
from rlix.control.loop import Loop
from rlix.control.planning import Decide, Planning
from rlix.control.ports import Clock, Nodes
from rlix.control.reconcile import Hold, Leaving, Part
from rlix.control.settings import Settings
from rlix.control.watch import Watch
from rlix.control.writer import EventStore
from rlix.protocol.errors import DeadlockError, PipelineGoneError
from rlix.protocol.events import (
    CountersKept,
    DemandReported,
    DevicesDiscovered,
    DrainStarted,
    Event,
    GangRequested,
    GrantRevoked,
    HoldersNamed,
    NodesCordoned,
    PipelineAllocated,
)
from rlix.protocol.messages import (
    Cluster,
    Demand,
    Device,
    Lease,
    LeaseState,
    LeaseStatus,
    Process,
    ReleaseReason,
    RolloutAnswer,
)
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.cycles import find_cycle
from rlix.scheduler.policies import POLICIES, Policy

logger = logging.getLogger(__name__)

_PLAIN = Asked()


class Core:
    """Observes, folds, plans, commits and acts. It never waits: whatever takes time is asked of `nodes`, or of jobs
    that call again, and goes on when the answer is there.

    Not thread-safe; it belongs to the thread of its clock.

    Args:
        pool: names this pool in device locks.
        wall: unix seconds.
        decide: turns a snapshot into the events to record; it may measure or check what `commit.decide` does.
        stopwatch: seconds, to measure what a turn of planning takes, whatever the clock shows meanwhile.
        strict: an error of the planner is raised, in place of being shown as trouble with a pipeline.
    """

    def __init__(
        self,
        settings: Settings,
        journal: EventStore,
        *,
        clock: Clock,
        nodes: Nodes,
        pool: str,
        wall: Callable[[], float] = time.time,
        policy: Policy | None = None,
        decide: Decide = decide,
        stopwatch: Callable[[], float] = time.monotonic,
        strict: bool = False,
    ) -> None:
        self.settings, self.clock = settings, clock
        self.known = Knowledge(settings, journal, clock, wall)
        self.state = self.known.state
        policy = POLICIES[settings.policy] if policy is None else policy
        self.planning = Planning(self.known, policy, decide, stopwatch, strict=strict)
        self.loop = Loop(self.known, self.planning, nodes, pool)
        self.departures = Departures(self.known, self.loop, nodes)
        self.watch = Watch(self.known, self.loop, self.departures, nodes)

    def close(self) -> None:
        """Does no more, and closes the journal."""
        self.known.closed = True
        self.known.writer.close()

    @property
    def trouble(self) -> str:
        """What keeps the control plane from granting anything, to everybody or to somebody; "" while all is well."""
        return "; ".join(filter(None, (self.known.writer.trouble, self.planning.trouble())))

    def record(self, *events: Event) -> None:
        self.known.record(*events)

    # -- from the journal --------------------------------------------------------------------------------------------

    def recover(self, events: Iterable[tuple[float, Event]]) -> int:
        """Folds what an earlier control plane of this pool has recorded, with its times; returns how much it was.

        Nothing is planned or ended for `settle_s`: holders say first what they hold. Whoever had a time to answer has
        it again, for nobody could while nobody asked. Then turns go on as ever.
        """
        known = self.known
        count = known.replay(events)
        if not count:
            return 0
        now = known.clock.time()
        settled = now + self.settings.settle_s
        self.planning.not_before = settled
        for request in self.state.requests.values():
            cluster = self.state.registrations[request.pipeline_id].cluster(request.cluster)
            ticket = known.gangs.open(request.id, request.key, request.pipeline_id, cluster, request.phase)
            ticket.asked_at = request.asked_at
            self._limit(ticket, request.until)
            self.not_asked(ticket)
        for job in known.jobs.values():
            job.heard_at = now
        for status in self.state.leases.values():
            self._resume(status, settled)
        for pipeline_id, why in self.state.ending.items():
            known.jobs[pipeline_id].ending = Departure(why, self.state.spared.get(pipeline_id))
            known.alarm.set(pipeline_id, settled)
        self.planning.soon()
        return count

    def _resume(self, status: LeaseStatus, settled: float) -> None:
        known, lease = self.known, status.lease
        job = known.jobs[lease.pipeline_id]
        if lease.holder is not None:
            job.heard(lease.holder, known.clock.time())
        if lease.phase is not Phase.ROLLOUT:
            self._reopen(lease, settled, pending=status.state is LeaseState.PENDING)
        elif status.state is LeaseState.ACTIVE:
            known.to_be_noted(lease)
        if lease.pipeline_id in self.state.ending:
            return
        if status.state is LeaseState.DRAINING and lease.phase is Phase.ROLLOUT and not status.reason:
            known.ask_back(lease)
        elif status.state in (LeaseState.DRAINING, LeaseState.QUARANTINED):
            why = status.reason.partition("; and ")[0]
            grace_s = self.settings.release_grace_s if status.state is LeaseState.DRAINING else 0.0
            leaving = Leaving(why, ReleaseReason.RELEASED, settled, settled + grace_s, told="")
            known.holds[lease.epoch] = Hold(leaving=leaving)
        if (hold := known.hold(lease.epoch)).leaving is not None:
            known.alarm.set(lease.epoch, hold.leaving.look_from)

    def _reopen(self, lease: Lease, settled: float, *, pending: bool) -> None:
        known = self.known
        cluster = self.state.registrations[lease.pipeline_id].cluster(lease.cluster)
        answered = self.state.answered_by(lease.epoch)  # of a pending lease, which may be revoked: then it waits again
        request_id = -lease.epoch if answered is None else answered.id
        ticket = known.gangs.open(request_id, lease.key, lease.pipeline_id, cluster, lease.phase)
        known.gangs.granted(request_id, lease.epoch)
        if pending:
            self._limit(ticket, None if answered is None else answered.until)
            self.not_asked(ticket)
            return
        ticket.decide(lease)
        if lease.epoch in known.granted_at:
            known.limit(lease, known.clock.time() - (known.wall() - known.granted_at[lease.epoch]), settled)

    def start(self) -> None:
        """From now on processes are looked at, once a second."""
        self.watch.start()

    # -- gangs -------------------------------------------------------------------------------------------------------

    def allocate(self, kind: str) -> str:
        self.known.writer.check()
        pipeline_id = f"{kind}_{self.state.next_pipeline}"
        self.record(PipelineAllocated(pipeline_id, kind))
        return pipeline_id

    def request(self, pipeline_id: str, cluster: Cluster, phase: Phase, asked: Asked = _PLAIN) -> Ticket:
        """Records a gang request; the ticket decides once it is active, or with the error: at once where it could never
        be granted, because its devices are gone or parts of the job wait for each other in a circle.
        """
        known, request_id = self.known, self.state.next_request_id
        until = None if asked.timeout_s is None else known.wall() + asked.timeout_s
        event = GangRequested(
            request_id,
            pipeline_id,
            cluster.name,
            phase,
            asked.key,
            asked.holder,
            asked.holding,
            asked.longest_s,
            asked.devices or asked.home,
            exact=bool(asked.devices),
            until=until,
            move_s=asked.move_s,
        )
        self.record(event)
        ticket = known.gangs.open(request_id, asked.key, pipeline_id, cluster, phase)
        if not can_run(self.state, ticket):
            self.loop.withdraw(ticket, PipelineGoneError(left(self.state, ticket)))
            return ticket
        circle = find_cycle(self.state.requests, self.state.leases, request_id)
        if circle:
            self.loop.withdraw(ticket, DeadlockError(f"pipeline {pipeline_id!r}: {circle}"))
        else:
            self._limit(ticket, until)
            ticket.timeout_s = math.inf if asked.timeout_s is None else asked.timeout_s
        return ticket

    def _limit(self, ticket: Ticket, until: float | None) -> None:
        if until is not None:
            ticket.expires_at = self.known.ends_at(until)
            ticket.timeout_s = round(ticket.expires_at - ticket.asked_at, 3)
            self.loop.await_request(ticket)

    def asked_again(self, ticket: Ticket) -> None:
        """Its caller waits for the answer."""
        ticket.forget_at = math.inf

    def not_asked(self, ticket: Ticket) -> None:
        """From now on nobody waits for the answer: who wants it still has a while to ask again."""
        ticket.forget_at = self.clock.time() + self.settings.abandon_after_s
        self.loop.await_request(ticket)

    # -- leases ------------------------------------------------------------------------------------------------------

    def given_back(self, *leases: Lease) -> None:
        """Their holder says that its bytes are gone from the devices of these leases.

        Those whose devices are free are released in one change.
        """
        self.loop.give_back(leases)

    def part_given_back(self, lease: Lease, devices: Sequence[int]) -> None:
        """The holder of a gang says that its bytes are gone from these of its devices, and keeps the others.

        If a part stays locked the whole lease is taken. A control plane that is restarted before that forgets the
        word, and is asked again by who waits.
        """
        known, now = self.known, self.known.now
        hold = known.hold(lease.epoch)
        part = Part(tuple(devices), now, now + self.settings.release_grace_s)
        known.holds[lease.epoch] = replace(hold, parts=(*hold.parts, part))
        self.loop.turn([lease.epoch])

    def take(self, lease: Lease, why: str) -> None:
        """Ends a lease without its holder's help."""
        self.loop.take(lease, why)

    def why(self, epoch: int) -> str:
        """Why a lease was taken; "" when it was not, or long ago."""
        return next((ending.why for ending in self.known.endings if ending.epoch == epoch), "")

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def report(self, pipeline_id: str, cluster: str, demand: Demand) -> None:
        self.record(DemandReported(pipeline_id, cluster, demand))

    def poll(self, pipeline_id: str, cluster: str, held: Set[int], draining: Set[int]) -> RolloutAnswer:
        """What a rollout that knows of the epochs `held`, and is giving back those in `draining`, does not know yet.

        Nothing is kept of what it was told: a lost answer is given again.
        """
        known = self.known
        granted, taken, deadlines, existing, unknown = [], [], [], set(), []
        now = self.clock.time()
        job = known.jobs[pipeline_id]
        job.polled(cluster, now)
        if cluster in job.deaf:
            job.deaf.discard(cluster)
            self.planning.soon()
        for status in self.state.leases_of(pipeline_id):
            lease = status.lease
            if lease.cluster != cluster or lease.phase is not Phase.ROLLOUT:
                continue
            if status.state is LeaseState.ACTIVE:
                existing.add(lease.epoch)
                if known.hold(lease.epoch).leaving is not None:
                    continue  # it has given it back, and a node is still being asked
                if lease.epoch in held:
                    self.loop.noted(lease)
                elif known.is_written(lease):
                    granted.append(lease)
            elif status.state is LeaseState.DRAINING:
                existing.add(lease.epoch)
                if lease.epoch not in held:
                    unknown.append(lease)  # it never heard of it
                elif lease.epoch not in draining:
                    taken.append(lease)
                    leaving = known.hold(lease.epoch).leaving
                    deadlines.append(0.0 if leaving is None else max(0.0, leaving.kill_from - now))
        for lease in unknown:
            self.loop.give_back([lease])
        return RolloutAnswer(tuple(granted), tuple(taken), tuple(deadlines), tuple(sorted(held - existing)))

    # -- pipelines, processes and devices ----------------------------------------------------------------------------

    def end(self, pipeline_id: str, why: str, spare: Process | None = None) -> None:
        """Ends a pipeline; see `Departures.end`."""
        self.departures.end(pipeline_id, why, spare)

    def name_holders(self, pipeline_id: str, cluster: str, processes: Sequence[tuple[int, Process]]) -> None:
        named = tuple(sorted(processes))
        known = self.state.holders(pipeline_id, cluster)
        if any(known.get(rank) != process for rank, process in named):
            self.record(HoldersNamed(pipeline_id, cluster, named))

    def cordon(self, nodes: tuple[str, ...]) -> None:
        """A person's word on which nodes are out of service: all of them. `found` says what that means for devices."""
        if nodes != self.state.cordoned:
            self.known.writer.check()
            self.record(NodesCordoned(nodes))

    def used(self, epoch: int) -> None:
        """Devices that come into the pool have been used under this epoch of it. One that the journal does not know was
        granted by a control plane whose journal is gone: numbers go on above all that it can have given, so that
        nobody is taken for those it left behind, and no device refuses what is granted from now on."""
        if epoch >= self.state.next_epoch:
            logger.warning("devices remember lease %d of this pool, and its journal does not: it was moved away", epoch)
            self.record(CountersKept(epoch, 0, -1, int(self.known.wall())))

    def found(self, devices: tuple[Device, ...], draining: Set[str] = frozenset()) -> None:
        """Takes the devices as they are now into account. Those of `draining` nodes leave the pool as they become free:
        rollouts are asked for their bundles there, what was promised is taken back, and gangs go on."""
        before = self.state.draining
        if (devices, draining) == (self.state.discovered, before):
            return
        on = {device.id for device in devices if device.node_id in draining}
        back = {device.id for device in devices if device.node_id in before - draining}
        here = {device.id for device in devices}
        leases = list(self.state.leases.values())
        active = [status.lease for status in leases if status.state is LeaseState.ACTIVE]
        asked = [lease for lease in active if lease.phase is Phase.ROLLOUT and not on.isdisjoint(lease.devices)]
        pending = [status.lease for status in leases if status.state is LeaseState.PENDING]
        promised = [lease.epoch for lease in pending if not (here - on).issuperset(lease.devices)]
        self.record(
            *(GrantRevoked(epoch) for epoch in promised),  # who has other choices keeps the place in the queue
            *(DrainStarted(lease.epoch) for lease in asked),
            DevicesDiscovered(devices, tuple(sorted(draining))),
        )
        for status in list(self.state.leases.values()):
            if status.lease in asked or self._asked_in_vain(status, back):
                self.known.ask_back(status.lease)
        self.loop.withdraw_impossible()
        for status in list(self.state.leases.values()):
            if not here.issuperset(status.lease.devices):
                self.loop.node_lost(status.lease)

    def _asked_in_vain(self, status: LeaseStatus, back: Set[int]) -> bool:
        """Whether a rollout has had no end to its time for a bundle of a node that is in service again."""
        leaving = self.known.hold(status.lease.epoch).leaving
        return leaving is not None and leaving.kill_from == math.inf and not back.isdisjoint(status.lease.devices)
