"""The single writer: events into journal and state, plans into events, and what follows from them for the jobs."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rlix.control.endings import Endings
from rlix.control.gang_queue import Asked, GangQueue, Ticket
from rlix.control.job import GANG_GAP_S, Job
from rlix.control.lease_log import LeaseLog
from rlix.control.planning import Decide, Planning
from rlix.control.ports import Clock, Nodes
from rlix.control.rollouts import Rollouts
from rlix.control.settings import Settings
from rlix.control.watch import Watch
from rlix.control.writer import EventStore, Writer
from rlix.protocol.errors import (
    DeadlockError,
    PipelineGoneError,
    RlixError,
    StaleEpochError,
    WaitTimeoutError,
)
from rlix.protocol.events import (
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
    LeaseReleased,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineUnregistered,
)
from rlix.protocol.messages import Cluster, Demand, Device, Lease, LeaseState, Process, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.cycles import find_cycle
from rlix.scheduler.image import image
from rlix.scheduler.policies import POLICIES, Policy
from rlix.scheduler.state import State

logger = logging.getLogger(__name__)

_PLAIN = Asked()


class Core:
    """Every change is an event that goes through `record`. After a change, one turn of planning takes all changes so
    far into account. It never waits: whatever takes time is asked of `nodes`, or of jobs that call again, and goes on
    when the answer is there.

    Not thread-safe; it belongs to the thread of its clock.

    Args:
        pool: names this pool in device locks.
        wall: unix seconds.
        decide: turns a snapshot into the events to record; it may measure or check what `commit.decide` does.
        stopwatch: seconds, to measure what a turn of planning takes, whatever the clock shows meanwhile.
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
    ) -> None:
        self.state = State()
        self.settings = settings
        self.clock = clock
        self.nodes = nodes
        self.pool = pool
        self.wall = wall
        self.gangs = GangQueue(clock)
        self.log = LeaseLog()
        self.jobs: dict[str, Job] = {}
        self.granted_at: dict[int, float] = {}  # unix seconds, by epoch
        self.endings = Endings(self)
        self.rollouts = Rollouts(self)
        self.watch = Watch(self)
        self.writer = Writer(journal, clock, image=lambda: image(self.state), written=self._written)
        self.planning = Planning(self, POLICIES[settings.policy] if policy is None else policy, decide, stopwatch)
        self._unwritten: list[Lease] = []  # active, but not in the journal: nobody knows of them yet
        self.closed = False

    def close(self) -> None:
        """Plans no more and closes the journal."""
        self.closed = True
        self.writer.close()

    # -- events ------------------------------------------------------------------------------------------------------

    def record(self, *events: Event) -> None:
        """Takes events into account, in order: the only way in which the control plane's state changes.

        They are in the journal before anybody learns of them.
        """
        answered = self.apply(events)
        if all(isinstance(event, DemandReported) for event in events):
            self.planning.after_a_pause()
        else:
            self.planning.soon(answered=answered)

    def apply(self, events: Sequence[Event]) -> bool:
        """`record` without calling for another turn of planning. Returns whether a lease became active."""
        now = self.clock.time()
        active: list[Lease] = []
        applied = 0
        try:
            for event in events:
                active.extend(self._fold(event, now, self.wall()))
                applied += 1
        finally:
            self.writer.append(events[:applied])
        self._unwritten += active
        if not self.writer.trouble:
            self._hand_out_written()
        return bool(active)

    def _written(self) -> None:
        """The journal can be written again: what became active meanwhile is told now."""
        self._hand_out_written()
        self.planning.soon()

    def _hand_out_written(self) -> None:
        leases, self._unwritten = self._unwritten, []
        for lease in leases:
            status = self.state.leases.get(lease.epoch)
            if status is not None and status.state is LeaseState.ACTIVE:
                self._hand_out(lease)

    def recover(self, events: Iterable[tuple[float, Event]]) -> int:
        """Folds what an earlier control plane of this pool has recorded, with its times; returns how much it was.

        Nothing is planned for `settle_s`: holders say first what they hold.
        """
        count = 0
        now, wall = self.clock.time(), self.wall()
        for at, event in events:
            count += 1
            for lease in self._fold(event, now - max(0.0, wall - at), at):
                self._note_grant(lease, now - max(0.0, wall - at), at)
        if not count:
            return 0
        self.planning.not_before = now + self.settings.settle_s
        for request in self.state.requests.values():
            cluster = self.state.registrations[request.pipeline_id].cluster(request.cluster)
            self.gangs.open(request.id, request.key, request.pipeline_id, cluster, request.phase)
        for status in self.state.leases.values():
            if status.lease.phase is not Phase.ROLLOUT:
                self._reopen(status.lease, pending=status.state is LeaseState.PENDING)
        for job in self.jobs.values():
            job.heard_at = now
        self.rollouts.recover()
        self.endings.recover()
        self.planning.soon()
        return count

    def _reopen(self, lease: Lease, *, pending: bool) -> None:
        cluster = self.state.registrations[lease.pipeline_id].cluster(lease.cluster)
        answered = self.state.answered_by(lease.epoch)  # of a pending lease, which may be revoked: then it waits again
        request_id = -lease.epoch if answered is None else answered.id
        ticket = self.gangs.open(request_id, lease.key, lease.pipeline_id, cluster, lease.phase)
        self.gangs.granted(request_id, lease.epoch)
        if not pending:
            ticket.decide(lease)
            self._limit(lease, self.granted_at.get(lease.epoch, self.wall()))

    def _fold(self, event: Event, now: float, wall: float) -> tuple[Lease, ...]:
        """The state after the event, and what is kept about jobs beside it. Returns the leases that became active."""
        released = self.state.leases.get(event.epoch) if isinstance(event, LeaseReleased | DevicesReleased) else None
        active = self.state.apply(event, now)
        match event:
            case LeaseReleased() if released is not None:
                self._note_release(released.lease, event.reason, now, wall)
            case DevicesReleased() if released is not None:
                part = replace(released.lease, devices=event.devices)
                self._note_freed(part, ReleaseReason.RELEASED, now, wall)
            case PipelineAdmitted():
                self.jobs.setdefault(event.pipeline_id, Job(now))
            case PipelineUnregistered():
                self.jobs.pop(event.pipeline_id, None)
                self.log.end(event.pipeline_id, event.reason)
            case DemandReported():
                job = self.jobs.get(event.pipeline_id)
                if job is not None and job.rollout_ended(event.cluster, event.demand.trajectories):
                    self._phase_ended(job)
            case DrainStarted():
                self.log.add("shrinking", self.state.leases[event.epoch].lease, wall)
            case LeaseGranted() if event.request_id is not None:
                self.gangs.granted(event.request_id, event.lease.epoch)
            case GrantRevoked():
                self.gangs.revoked(event.epoch)
        return active

    def _note_release(self, lease: Lease, reason: ReleaseReason, now: float, wall: float) -> None:
        self._note_freed(lease, reason, now, wall)
        self.granted_at.pop(lease.epoch, None)
        job = self.jobs.get(lease.pipeline_id)
        if job is not None and lease.phase is not Phase.ROLLOUT and reason is ReleaseReason.RELEASED:
            self._phase_ended(job)
        ticket = self.gangs.holding(lease.epoch)
        if ticket is not None:
            self.gangs.close(ticket)

    def _note_freed(self, lease: Lease, reason: ReleaseReason, now: float, wall: float) -> None:
        """`lease` with the devices that are free now."""
        self.log.add("released", lease, wall, reason=reason)
        job = self.jobs.get(lease.pipeline_id)
        if job is not None:
            job.usage.released(lease.epoch, len(lease.devices), now)

    def _phase_ended(self, job: Job) -> None:
        """Its gang's devices are kept from other rollouts for a moment, then planned anew."""
        job.phase_ended(self.clock.time())
        self.clock.call_later(GANG_GAP_S, self._gap_ended, job)

    def _gap_ended(self, job: Job) -> None:
        if not job.rolling:  # what was kept went when it rolled out again
            self.planning.soon()

    def _note_grant(self, lease: Lease, now: float, wall: float, waited_s: float | None = None) -> None:
        self.log.add("granted", lease, wall, waited_s=waited_s)
        self.granted_at[lease.epoch] = wall
        self.jobs[lease.pipeline_id].usage.granted(lease.epoch, len(lease.devices), now)

    def _hand_out(self, lease: Lease) -> None:
        """Tells whoever waited that the lease is active."""
        self._note_grant(lease, self.clock.time(), self.wall(), self.gangs.answer(lease))
        if lease.phase is Phase.ROLLOUT:
            self.rollouts.granted(lease)
        else:
            self._limit(lease, self.wall())

    def _limit(self, lease: Lease, since: float) -> None:
        ticket = self.gangs.holding(lease.epoch)
        if ticket is None or lease.longest_s is None:
            return
        why = f"{lease.phase.name} took longer than the {lease.longest_s:g} s that it declared"
        left_s = max(0.0, since + lease.longest_s - self.wall())
        self.gangs.after(ticket, "longest", left_s, lambda: self.endings.take(lease, why))

    # -- what callers ask for ----------------------------------------------------------------------------------------

    def allocate(self, kind: str) -> str:
        self.writer.check()
        pipeline_id = f"{kind}_{self.state.next_pipeline}"
        self.record(PipelineAllocated(pipeline_id, kind))
        return pipeline_id

    def request(self, pipeline_id: str, cluster: Cluster, phase: Phase, asked: Asked = _PLAIN) -> Ticket:
        """Records a gang request; the ticket decides once it is active, or with the error: at once where it could never
        be granted, because its devices are gone or parts of the job wait for each other in a circle.
        """
        request_id = self.state.next_request_id
        ticket = self.gangs.open(request_id, asked.key, pipeline_id, cluster, phase)
        event = GangRequested(
            request_id,
            pipeline_id,
            cluster.name,
            phase,
            asked.key,
            asked.holder,
            asked.holding,
            asked.longest_s,
            asked.devices,
            exact=bool(asked.devices),
        )
        self.record(event)
        if not self._can_run(ticket):
            self.withdraw(ticket, PipelineGoneError(self._left(ticket)))
            return ticket
        circle = find_cycle(self.state.requests, self.state.leases, request_id)
        if circle:
            self.withdraw(ticket, DeadlockError(f"pipeline {pipeline_id!r}: {circle}"))
        elif asked.timeout_s is not None:
            timeout_s = asked.timeout_s
            self.gangs.after(ticket, "expiry", timeout_s, lambda: self._expire(ticket, timeout_s))
        return ticket

    def withdraw(self, ticket: Ticket, error: RlixError | None = None) -> None:
        """Ends a request, waiting or granted, for which nobody will use the lease."""
        if ticket.request_id in self.state.requests:
            self.record(GangCancelled(ticket.request_id))
        elif ticket.epoch is not None and ticket.epoch in self.state.leases:
            self.endings.given_back(self.state.leases[ticket.epoch].lease)
        text = f"the request of {ticket.pipeline_id}/{ticket.cluster.name} was withdrawn"
        ticket.decide(error or StaleEpochError(text))
        self.gangs.close(ticket)

    def abandon(self, ticket: Ticket) -> None:
        """Drops the request of a caller that stopped asking."""
        logger.warning("nobody waits for request %d of %s any more", ticket.request_id, ticket.pipeline_id)
        self.withdraw(ticket)

    def name_holders(self, pipeline_id: str, cluster: str, processes: Sequence[tuple[int, Process]]) -> None:
        named = tuple(sorted(processes))
        known = self.state.holders(pipeline_id, cluster)
        if any(known.get(rank) != process for rank, process in named):
            self.record(HoldersNamed(pipeline_id, cluster, named))

    def report(self, pipeline_id: str, cluster: str, demand: Demand) -> None:
        self.record(DemandReported(pipeline_id, cluster, demand))

    def found(self, devices: tuple[Device, ...]) -> None:
        """Takes the pool's devices as they are now into account."""
        if devices == self.state.devices:
            return
        self.record(DevicesDiscovered(devices))
        here = {device.id for device in devices}
        for ticket in self.gangs.waiting():
            if not self._can_run(ticket):
                self.withdraw(ticket, PipelineGoneError(self._left(ticket)))
        for status in list(self.state.leases.values()):
            if not here.issuperset(status.lease.devices):
                self.endings.take(status.lease, "its node left the pool", reason=ReleaseReason.NODE_LOST)

    def _can_run(self, ticket: Ticket) -> bool:
        return any(all(self.state.device(d) is not None for d in choice) for choice in self.choices(ticket))

    def choices(self, ticket: Ticket) -> tuple[tuple[int, ...], ...]:
        """The sets of devices of which a request waits for one."""
        granted = None if ticket.epoch is None else self.state.answered_by(ticket.epoch)
        return (self.state.requests.get(ticket.request_id) or granted or ticket.cluster).choices

    def _expire(self, ticket: Ticket, timeout_s: float) -> None:
        if ticket.outcome is not None:
            return
        what = f"{ticket.pipeline_id}/{ticket.cluster.name} for {ticket.phase.name}"
        text = f"devices {self._wanted(ticket)} were not granted to {what} within {timeout_s:g} s"
        self.withdraw(ticket, WaitTimeoutError(f"{text}; {self.behind(ticket)}"))

    def behind(self, ticket: Ticket) -> str:
        """Who is in the way of a request: for people."""
        wanted = set().union(*self.choices(ticket))
        held = [
            f"{s.lease.pipeline_id}/{s.lease.cluster} ({s.lease.phase.name}, {s.state}) holds {sorted(common)}"
            for s in self.state.leases.values()
            if (common := wanted.intersection(s.lease.devices)) and s.lease.epoch != ticket.epoch
        ]
        ahead = [
            f"{r.pipeline_id}/{r.cluster} ({r.phase.name}) waits in front of it"
            for r in self.state.requests.values()
            if wanted.intersection(r.devices) and (r.phase, r.id) < (ticket.phase, ticket.request_id)
        ]
        stuck = [self.writer.trouble] if self.writer.trouble else []
        return "; ".join(held + ahead + stuck) or "nobody holds them: the scheduler did not come to it"

    def _left(self, ticket: Ticket) -> str:
        what = f"{ticket.pipeline_id}/{ticket.cluster.name}"
        return f"{what} asks for devices that left the pool with their node: {self._wanted(ticket)}"

    def _wanted(self, ticket: Ticket) -> str:
        return " or ".join(str(list(devices)) for devices in self.choices(ticket))
