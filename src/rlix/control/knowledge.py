"""What the control plane knows: a fold over events, which are in the journal before anybody learns of them."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rlix.control.alarm import Alarm
from rlix.control.gang_queue import GangQueue
from rlix.control.job import Job
from rlix.control.lease_log import LeaseLog
from rlix.control.ports import Clock
from rlix.control.reconcile import Hold, asked_back
from rlix.control.settings import Settings
from rlix.control.writer import EventStore, Writer
from rlix.protocol.events import (
    DemandReported,
    DevicesReleased,
    DrainStarted,
    Event,
    GangRequested,
    GrantRevoked,
    LeaseGranted,
    LeaseReleased,
    PipelineAdmitted,
    PipelineEnding,
    PipelineUnregistered,
)
from rlix.protocol.messages import Cluster, Ending, Lease, LeaseState, Process, ReleaseReason
from rlix.protocol.types import LAUNCHER, Phase
from rlix.scheduler.image import image
from rlix.scheduler.state import State

KEPT_ENDINGS = 20


class Knowledge:
    """`record` is the only way in which the control plane's state changes.

    Beside the recorded state it keeps what was said and seen of leases (`holds`, by epoch), requests (`gangs`) and
    pipelines (`jobs`). `changed` is told of every change: whether a lease became active by it, and whether it is
    nothing but demand. `endings` are the latest ends that nobody asked for, or somebody else: for people, and not over
    a restart.
    """

    def __init__(self, settings: Settings, journal: EventStore, clock: Clock, wall: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self.wall = wall
        self.state = State()
        self.alarm = Alarm(clock)
        self.gangs = GangQueue(clock)
        self.log = LeaseLog()
        self.jobs: dict[str, Job] = {}
        self.holds: dict[int, Hold] = {}
        self.granted_at: dict[int, float] = {}  # unix seconds, by epoch
        self.changed: Callable[[bool, bool], None] = lambda answered, demand_only: None
        self.writer = Writer(journal, clock, image=lambda: image(self.state, clock.time()), written=self._written)
        self.closed = False
        self.endings: deque[Ending] = deque(maxlen=KEPT_ENDINGS)
        self._unwritten: list[Lease] = []  # active, but not in the journal: nobody knows of them yet
        self._watchers: dict[object, list[Callable[[], None]]] = {}

    @property
    def now(self) -> float:
        return self.alarm.time()

    # -- those that wait for news ------------------------------------------------------------------------------------

    def watchers(self, *key: object) -> list[Callable[[], None]]:
        """What is called, once, when there may be news of a rollout (pipeline and cluster), a lease (its epoch) or the
        end of a pipeline (its id)."""
        return self._watchers.setdefault(key, [])

    def wake(self, *key: object) -> None:
        for changed in self._watchers.pop(key, ()):
            changed()

    # -- events ------------------------------------------------------------------------------------------------------

    def record(self, *events: Event) -> None:
        """Takes events into account, in order."""
        answered = self.apply(events)
        self.changed(answered, all(isinstance(event, DemandReported) for event in events))

    def apply(self, events: Sequence[Event]) -> bool:
        """`record` without telling `changed`. Returns whether a lease became active.

        Raises JournalError, and changes nothing, when an event cannot be put into the journal at all.
        """
        self.writer.check_writable(events)
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

    def is_written(self, lease: Lease) -> bool:
        """Whether that it is active is in the journal, so that somebody may hear of it."""
        return lease not in self._unwritten

    def _written(self) -> None:
        """The journal can be written again: what became active meanwhile is told now."""
        self._hand_out_written()
        self.changed(False, False)

    def _hand_out_written(self) -> None:
        leases, self._unwritten = self._unwritten, []
        for lease in leases:
            status = self.state.leases.get(lease.epoch)
            if status is not None and status.state is LeaseState.ACTIVE:
                self._hand_out(lease)

    def replay(self, events: Iterable[tuple[float, Event]]) -> int:
        """Folds what an earlier control plane of this pool has recorded, with its times; returns how much it was."""
        count = 0
        now, wall = self.clock.time(), self.wall()
        for at, event in events:
            count += 1
            for lease in self._fold(event, now - max(0.0, wall - at), at):
                self._note_grant(lease, at)
        return count

    def _fold(self, event: Event, now: float, wall: float) -> tuple[Lease, ...]:
        """The state after the event, and what is kept beside it. Returns the leases that became active."""
        released = self.state.leases.get(event.epoch) if isinstance(event, LeaseReleased | DevicesReleased) else None
        before = self.state.leases_of(event.pipeline_id) if isinstance(event, PipelineEnding) else ()
        active = self.state.apply(event, now)
        match event:
            case LeaseReleased() if released is not None:
                self._note_release(released.lease, event.reason, wall)
            case DevicesReleased() if released is not None:
                part = replace(released.lease, devices=event.devices)
                self.log.add("released", part, wall, reason=ReleaseReason.RELEASED)
            case PipelineAdmitted():
                self.jobs.setdefault(event.pipeline_id, Job(now))
            case PipelineUnregistered():
                self.jobs.pop(event.pipeline_id, None)
                self.alarm.cancel(event.pipeline_id)
                self.log.end(event.pipeline_id, event.reason)
            case DemandReported():
                job = self.jobs.get(event.pipeline_id)
                if job is not None and job.rollout_ended(event.cluster, event.demand.trajectories):
                    self._phase_ended(event.pipeline_id, job)
            case DrainStarted():
                self.log.add("shrinking", self.state.leases[event.epoch].lease, wall)
            case GangRequested() if event.holder is not None and event.pipeline_id in self.jobs:
                self.jobs[event.pipeline_id].heard(event.holder, now)
            case PipelineEnding():
                for status in before:
                    if status.lease.epoch not in self.state.leases:  # it was not active yet
                        self._forget(status.lease.epoch)
            case LeaseGranted() if event.request_id is not None:
                self.gangs.granted(event.request_id, event.lease.epoch)
            case GrantRevoked():
                self.gangs.revoked(event.epoch)
                self._forget(event.epoch)
        return active

    def _forget(self, epoch: int) -> None:
        self.holds.pop(epoch, None)
        self.alarm.cancel(epoch)

    def hold(self, epoch: int) -> Hold:
        """What is said and seen of a lease."""
        return self.holds.get(epoch) or Hold()

    def _note_release(self, lease: Lease, reason: ReleaseReason, wall: float) -> None:
        self.log.add("released", lease, wall, reason=reason)
        self.granted_at.pop(lease.epoch, None)
        self._forget(lease.epoch)
        job = self.jobs.get(lease.pipeline_id)
        if job is not None and lease.phase is not Phase.ROLLOUT and reason is ReleaseReason.RELEASED:
            self._phase_ended(lease.pipeline_id, job)
        ticket = self.gangs.holding(lease.epoch)
        if ticket is not None:
            self.gangs.close(ticket)

    def _phase_ended(self, pipeline_id: str, job: Job) -> None:
        """Its gang's devices are kept from other rollouts for a moment, then planned anew."""
        self.alarm.set(("gap", pipeline_id), job.phase_ended(self.clock.time()))

    def _note_grant(self, lease: Lease, wall: float, waited_s: float | None = None) -> None:
        self.log.add("granted", lease, wall, waited_s=waited_s)
        self.granted_at[lease.epoch] = wall

    def _hand_out(self, lease: Lease) -> None:
        """Tells whoever waited that the lease is active."""
        now, wall = self.clock.time(), self.wall()
        self._note_grant(lease, wall, self.gangs.answer(lease))
        if lease.phase is Phase.ROLLOUT:
            self.to_be_noted(lease)
            self.wake(lease.pipeline_id, lease.cluster)
        else:
            self.limit(lease, now)

    def to_be_noted(self, lease: Lease) -> None:
        """A rollout has its time to note a bundle."""
        by = self.clock.time() + self.jobs[lease.pipeline_id].note_s(lease.cluster, self.settings)
        self.holds[lease.epoch] = replace(self.hold(lease.epoch), note_by=by)
        self.alarm.set(lease.epoch, by)

    def limit(self, lease: Lease, since: float, earliest: float = 0.0) -> None:
        """A gang's phase has the time that it declared. It is not taken before `earliest`."""
        if lease.longest_s is not None:
            by = max(since + lease.longest_s, earliest)
            self.holds[lease.epoch] = replace(self.hold(lease.epoch), ends_by=by)
            self.alarm.set(lease.epoch, by)

    def note(self, pipeline_id: str, why: str, lease: Lease | None = None) -> Ending:
        """Keeps an end for people."""
        registration = self.state.registrations.get(pipeline_id)
        of_lease = (lease.epoch, lease.cluster, lease.devices) if lease else ()
        name = registration.name if registration else ""
        self.endings.append(Ending(self.wall(), pipeline_id, name, why, *of_lease))
        return self.endings[-1]

    # -- questions ---------------------------------------------------------------------------------------------------

    def holders(self, lease: Lease) -> tuple[Process, ...]:
        """The processes that keep bytes under the lease: those named, or else those that took it."""
        if named := self.named_holders(lease):
            return named
        if lease.holder is not None:
            return (lease.holder,)
        job = self.jobs.get(lease.pipeline_id)
        return tuple(p for p, caller in job.callers.items() if lease.epoch in caller.held) if job else ()

    def workers(self, pipeline_id: str) -> list[Process]:
        """The processes that were named to keep bytes under any lease of a pipeline's."""
        clusters = self.state.registrations[pipeline_id].clusters
        return [process for cluster in clusters for process in self.state.holders(pipeline_id, cluster.name).values()]

    def of_others(self, pipeline_id: str) -> set[Process]:
        """The processes that other pipelines, which go on, have named, are spoken for by or were launched by."""
        found: set[Process] = set()
        for other, job in self.jobs.items():
            if other != pipeline_id and job.ending is None:
                programs = (self.state.holders(other, of).values() for of in ("", LAUNCHER))
                found.update(job.callers, self.workers(other), *programs)
        return found

    def named_holders(self, lease: Lease) -> tuple[Process, ...]:
        """The processes that were named to keep bytes under the lease."""
        named: Mapping[int, Process] = self.state.holders(lease.pipeline_id, lease.cluster)
        if lease.bundle is not None:
            return (named[lease.bundle],) if lease.bundle in named else ()
        return tuple(named.values())

    def ask_back(self, lease: Lease) -> None:
        """Its rollout, which has been told by a `DrainStarted`, has its time. Nobody waits for what is drained, so
        there it has all the time it wants."""
        limit_s = math.inf if self.state.on_draining(lease.devices) else self.settings.shrink_deadline_s
        self.holds[lease.epoch] = hold = asked_back(self.hold(lease.epoch), self.now, limit_s)
        assert hold.leaving is not None
        self.alarm.set(lease.epoch, hold.leaving.look_from)
        self.wake(lease.pipeline_id, lease.cluster)

    def drained(self, pipeline_id: str, cluster: Cluster) -> bool:
        """Whether a pipeline that holds nothing cannot roll out, because its rollout's nodes are drained and others are
        not."""
        state = self.state
        rolls = state.demand(pipeline_id, cluster.name).trajectories
        if not rolls or state.out_of_service or state.leases_of(pipeline_id):
            return False
        lent = any(all(map(state.is_lent, bundle)) for bundle in cluster.each_bundle())
        return not lent and any(map(state.on_draining, cluster.each_bundle()))

    def stranded(self, pipeline_id: str) -> str:
        """The elastic cluster that has something to do and all of whose bundles were lost; "" if none."""
        state = self.state
        for cluster in state.registrations[pipeline_id].clusters:
            rolls = cluster.elastic and state.demand(pipeline_id, cluster.name).trajectories
            if rolls and not any(all(map(state.is_discovered, bundle)) for bundle in cluster.each_bundle()):
                return cluster.name
        return ""

    def ends_at(self, until: float | None) -> float:
        """The clock's time at these unix seconds."""
        return math.inf if until is None else self.clock.time() + (until - self.wall())
