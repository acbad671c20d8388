"""The single writer: events into journal and state, plans into events, and what follows from them for the jobs."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import groupby

from rlix.control.coordinator_link import CoordinatorError, kill_workers
from rlix.control.gang_queue import GangQueue, Ticket
from rlix.control.job import GANG_GAP_S, Job
from rlix.control.journal import Journal, JournalError
from rlix.control.lease_log import LeaseLog
from rlix.control.settings import Settings
from rlix.control.uncollected import uncollected
from rlix.protocol.errors import PipelineGoneError, PlanError, RlixError, WaitTimeoutError
from rlix.protocol.events import (
    DemandReported,
    Event,
    GangCancelled,
    GangRequested,
    LeaseGranted,
    LeaseReleased,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineUnregistered,
    ShrinkStarted,
)
from rlix.protocol.messages import Cluster, Demand, Lease, LeaseState, Registration, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.policies import POLICIES
from rlix.scheduler.snapshot import RolloutState, Snapshot
from rlix.scheduler.state import State

logger = logging.getLogger(__name__)

_PLANNING = "planning"
_SHORT_TURN_S = 0.001
_PAUSE_TURNS = 4


class Core:
    """Every change is an event that goes through `record`. After a change, one turn of the planning loop takes all
    changes so far into account. Whatever waits for a job runs in a task of its own, so that no job holds the loop up.

    Needs a running event loop and belongs to it.
    """

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.state = State()
        self.journal = journal
        self.gangs = GangQueue()
        self.log = LeaseLog(now=time.time)
        self.jobs: dict[str, Job] = {}
        self._settings = settings
        self._policy = POLICIES[settings.policy]
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._allocated = 0
        self._turn_s = 0.0  # what the last turn of the planning loop took
        self._later: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts to plan."""
        self._spawn(self._plan_forever(), _PLANNING)

    def close(self) -> None:
        """Stops all tasks and closes the journal."""
        for task in self._tasks:
            task.cancel()
        self.journal.close()

    def record(self, *events: Event) -> None:
        """Takes events into account, in order: the only way in which the control plane's state changes.

        They are in the journal before anybody learns of them.
        """
        active: list[Lease] = []
        applied, now = 0, self._loop.time()
        try:
            for event in events:
                ended = self._leases_ended_by(event)
                active.extend(self.state.apply(event, now))
                applied += 1
                self._note(event, ended)
        finally:
            self._write(events[:applied])
        self._hand_out(active)
        if all(isinstance(event, DemandReported) for event in events):
            self._plan_soon()
        else:
            self._changed.set()

    def _write(self, events: Sequence[Event]) -> None:
        try:
            self.journal.append(events)
        except JournalError:
            # The pool is worth more than its record: a full disk must not stop every job.
            logger.critical(
                "%d events are not in the journal: a restart will not know of them", len(events), exc_info=True
            )

    # -- what callers ask for ----------------------------------------------------------------------------------------

    def allocate(self, kind: str) -> str:
        self._allocated += 1
        pipeline_id = f"{kind}_{self._allocated}"
        self.record(PipelineAllocated(pipeline_id, kind))
        return pipeline_id

    def admit(self, registration: Registration) -> None:
        pipeline_id = registration.pipeline_id
        self.record(PipelineAdmitted(pipeline_id))
        job = self.jobs[pipeline_id] = Job(registration, self._loop.time())
        job.watch = self._spawn(self._watch(pipeline_id, job), f"watch over {pipeline_id}")

    def request(self, pipeline_id: str, cluster: Cluster, phase: Phase, timeout_s: float | None) -> Ticket:
        """Records a gang request; the ticket's future brings the lease once it is active, or the error."""
        ticket = self.gangs.open(self.state.next_request_id, pipeline_id, cluster, phase)
        self.record(GangRequested(ticket.request_id, pipeline_id, cluster.name, phase))
        if timeout_s is not None:
            self.gangs.after(ticket, "expiry", timeout_s, lambda: self._expire(ticket, timeout_s))
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Ends a request, waiting or granted, for which nobody will use the lease."""
        if ticket.request_id in self.state.requests:
            self.record(GangCancelled(ticket.request_id))
        elif ticket.epoch is not None and ticket.epoch in self.state.leases:
            self.record(LeaseReleased(ticket.epoch, ReleaseReason.RELEASED))

    def abandon(self, ticket: Ticket) -> None:
        """Drops the request of a caller that stopped asking."""
        logger.warning("nobody waits for request %d of %s any more", ticket.request_id, ticket.pipeline_id)
        self.withdraw(ticket)
        self.gangs.close(ticket)

    async def end(self, pipeline_id: str, reason: str) -> None:
        """Ends a pipeline: refuses its requests, kills its workers, then frees its devices."""
        job = self.jobs.get(pipeline_id)
        if job is None:
            self.record(PipelineUnregistered(pipeline_id, reason))
            return
        if job.closing is None:
            job.closing = self._spawn(self._end(pipeline_id, job, reason), f"end of {pipeline_id}")
        await asyncio.shield(job.closing)

    async def _end(self, pipeline_id: str, job: Job, reason: str) -> None:
        logger.info("pipeline %s ends: %s", pipeline_id, reason or "unregistered")
        for ticket in self.gangs.of_pipeline(pipeline_id):
            self.withdraw(ticket)
            text = f"pipeline {pipeline_id!r} was unregistered while it waited for {ticket.cluster.name!r}"
            self.gangs.refuse(ticket, PipelineGoneError(f"{text}: {reason}" if reason else text))
        await kill_workers(job.workers())
        if job.watch is not None:
            job.watch.cancel()
        del self.jobs[pipeline_id]
        self.record(PipelineUnregistered(pipeline_id, reason))
        self.log.end(pipeline_id)

    async def _watch(self, pipeline_id: str, job: Job) -> None:
        def given_up() -> bool:
            """A pipeline may do without a coordinator as long as it uses the control plane itself."""
            waits = any(request.pipeline_id == pipeline_id for request in self.state.requests.values())
            silent_s = time.monotonic() - job.heard_at
            return not waits and not self.state.leases_of(pipeline_id) and silent_s > self._settings.coordinator_wait_s

        reason = await job.link.ended(given_up)
        job.watch = None
        await self.end(pipeline_id, reason)

    def _expire(self, ticket: Ticket, timeout_s: float) -> None:
        if ticket.answer.done():
            return
        what = f"{ticket.pipeline_id}/{ticket.cluster.name} for {ticket.phase.name}"
        wanted = " or ".join(str(list(devices)) for devices in ticket.cluster.choices)
        error = WaitTimeoutError(
            f"devices {wanted} were not granted to {what} within {timeout_s:g} s; {self._who_is_in_the_way(ticket)}"
        )
        self.withdraw(ticket)
        self.gangs.refuse(ticket, error)

    def _who_is_in_the_way(self, ticket: Ticket) -> str:
        wanted = set().union(*ticket.cluster.choices)
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
        return "; ".join(held + ahead) or "nobody holds them: the scheduler did not come to it"

    # -- planning ----------------------------------------------------------------------------------------------------

    async def _plan_forever(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(0)  # lets callers that are ready now be part of this turn
            self._changed.clear()
            start = time.monotonic()
            snapshot = self._snapshot()
            try:
                with uncollected():
                    events = decide(snapshot, self.state, self._policy)
            except PlanError:
                logger.exception("the planner broke a rule; nothing is done until the next change: %r", snapshot)
            else:
                self._carry_out(events)
            self._turn_s = time.monotonic() - start

    def _plan_soon(self) -> None:
        """Plans after a pause in proportion to what a turn takes: heartbeats must not keep a large pool's loop busy."""
        if self._turn_s < _SHORT_TURN_S:
            self._changed.set()
        elif self._later is None or self._later.when() <= self._loop.time():
            self._later = self._loop.call_later(_PAUSE_TURNS * self._turn_s, self._changed.set)

    def _snapshot(self) -> Snapshot:
        """The state as the planner should see it: with what each job has used so far; a job that is ending or
        failed a moment ago wants nothing; one that has just ended a phase may ask for a gang any moment."""
        now = self._loop.time()
        snapshot = self.state.snapshot(now)
        rollouts = (self._as_seen(rollout, self.jobs[rollout.pipeline_id], now) for rollout in snapshot.rollouts)
        return replace(snapshot, rollouts=tuple(rollouts))

    def _as_seen(self, rollout: RolloutState, job: Job, now: float) -> RolloutState:
        if job.muted(now):
            return replace(rollout, demand=Demand(0))
        used_gpu_s, age_s = job.usage.gpu_s(now), job.usage.age_s(now)
        expected = rollout.demand.trajectories == 0 and job.expects_gang(now)
        return replace(rollout, used_gpu_s=used_gpu_s, age_s=age_s, gang_expected=expected)

    def _carry_out(self, events: Sequence[Event]) -> None:
        if not events:
            return
        shrinking = [self.state.leases[event.epoch].lease for event in events if isinstance(event, ShrinkStarted)]
        self.record(*events)
        for pipeline_id, leases in _by_pipeline(shrinking):
            self._spawn(self._shrink(self.jobs[pipeline_id], leases), f"shrink of {pipeline_id}")

    # -- what follows ------------------------------------------------------------------------------------------------

    def _leases_ended_by(self, event: Event) -> list[tuple[Lease, ReleaseReason]]:
        if isinstance(event, LeaseReleased) and event.epoch in self.state.leases:
            return [(self.state.leases[event.epoch].lease, event.reason)]
        if isinstance(event, PipelineUnregistered):
            return [(s.lease, ReleaseReason.UNREGISTERED) for s in self.state.leases_of(event.pipeline_id)]
        return []

    def _note(self, event: Event, ended: Sequence[tuple[Lease, ReleaseReason]]) -> None:
        for lease, reason in ended:
            self.log.add("released", lease, reason=reason)
            if lease.pipeline_id in self.jobs:
                self.jobs[lease.pipeline_id].usage.released(lease.epoch, self._loop.time())
            if lease.phase is not Phase.ROLLOUT and reason is ReleaseReason.RELEASED:
                self._phase_ended(lease.pipeline_id)
        if isinstance(event, DemandReported):
            job = self.jobs.get(event.pipeline_id)
            if job is not None and job.rollout_ended(event.demand.trajectories):
                self._phase_ended(event.pipeline_id)
        if isinstance(event, ShrinkStarted):
            self.log.add("shrinking", self.state.leases[event.epoch].lease)
        if isinstance(event, LeaseGranted) and event.request_id is not None:
            self.gangs.grant(event.request_id, event.lease.epoch)

    def _phase_ended(self, pipeline_id: str) -> None:
        """Its gang's devices are kept from other rollouts for a moment, then planned anew."""
        if pipeline_id in self.jobs:
            self.jobs[pipeline_id].phase_ended(self._loop.time())
            self._loop.call_later(GANG_GAP_S, self._changed.set)

    def _hand_out(self, active: Sequence[Lease]) -> None:
        """Tells those who waited that their leases are active."""
        for lease in active:
            self.log.add("granted", lease, waited_s=self.gangs.answer(lease))
            self.jobs[lease.pipeline_id].usage.granted(lease.epoch, len(lease.devices), self._loop.time())
        for pipeline_id, leases in _by_pipeline([lease for lease in active if lease.phase is Phase.ROLLOUT]):
            self._spawn(self._grow(self.jobs[pipeline_id], leases), f"growth of {pipeline_id}")

    async def _grow(self, job: Job, leases: tuple[Lease, ...]) -> None:
        try:
            await job.link.grow(leases, self._settings.grow_timeout_s)
        except CoordinatorError as error:
            await self._take_back(job, leases, error, LeaseState.ACTIVE)
        else:
            job.succeeded()

    async def _shrink(self, job: Job, leases: tuple[Lease, ...]) -> None:
        deadline_s = self._settings.shrink_deadline_s
        try:
            await job.link.shrink(leases, deadline_s)
        except CoordinatorError as error:
            await self._take_back(job, leases, error, LeaseState.DRAINING)
        else:
            job.succeeded()
            self._release(leases, ReleaseReason.SHRUNK, LeaseState.DRAINING)

    async def _take_back(self, job: Job, leases: tuple[Lease, ...], error: RlixError, state: LeaseState) -> None:
        """Ends leases of a job that failed to note or to give back bundles, without its help."""
        pause = job.failed(self._loop.time())
        self._loop.call_later(pause, self._changed.set)
        name = job.registration.pipeline_id
        logger.warning("%s loses %d rollout bundles and gets none for %.0f s: %s", name, len(leases), pause, error)
        await kill_workers(job.take_workers_of(leases))
        self._release(leases, ReleaseReason.KILLED, state)
        try:
            await job.link.bundles_lost(leases, self._settings.grow_timeout_s)
        except CoordinatorError as lost:
            logger.info("%s", lost)

    def _release(self, leases: Sequence[Lease], reason: ReleaseReason, state: LeaseState) -> None:
        """Releases those leases that are still held in this state: they may have ended meanwhile."""
        held = self.state.leases
        alive = [lease.epoch for lease in leases if lease.epoch in held and held[lease.epoch].state is state]
        if alive:
            self.record(*(LeaseReleased(epoch, reason) for epoch in alive))

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> "asyncio.Task[None]":
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("a task of the control plane failed: %s", task.get_name(), exc_info=error)
            if task.get_name() == _PLANNING:  # a bug that one state of the pool brings out must not stop all planning
                self.start()


def _by_pipeline(leases: Sequence[Lease]) -> list[tuple[str, tuple[Lease, ...]]]:
    ordered = sorted(leases, key=lambda lease: (lease.pipeline_id, lease.epoch))
    return [(pipeline_id, tuple(group)) for pipeline_id, group in groupby(ordered, key=lambda lease: lease.pipeline_id)]
