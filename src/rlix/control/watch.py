"""Once a second: who does not speak any more, who was stopped, who does not know what it holds."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rlix.control.departures import Departures
from rlix.control.job import Caller, Job
from rlix.control.knowledge import Knowledge
from rlix.control.loop import Loop
from rlix.control.ports import Nodes
from rlix.control.settings import Settings
from rlix.protocol.messages import LeaseState, LeaseStatus, Process
from rlix.protocol.types import LAUNCHER

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_ASK_AFTER_S = 3.0  # of silence; callers beat once a second
_ANSWER_S = 60.0  # for a node to say what its processes do; then it is asked again
_UNKNOWN_FOR_S = 10.0  # that a lease may be unknown to the process that asked for it: an answer may be on its way
STOPPED = "was stopped (SIGSTOP) and did not go on"
_DIED = "died"
_PROGRAM = "its program, process"


def died_by_itself(why: str) -> bool:
    """Of why a pipeline ended: that its program died, which the control plane saw, and did not do."""
    return why.startswith(_PROGRAM) and why.endswith(f" {_DIED}")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node said of a process, for the first time at `since` and lately at `last`."""

    state: str
    since: float
    last: float


def fate(seen: Seen | None, settings: Settings) -> str:
    """What became of a process; "" while it lives, may go on, or nothing is known of it."""
    if seen is None or seen.state == "running":
        return ""
    if seen.state == "dead":
        return _DIED
    return STOPPED if seen.last - seen.since >= settings.stopped_s else ""


class Watch:
    """Looks at the processes behind leases, requests and pipelines, and ends what nobody will give back.

    Nodes are asked beside each other. Of a process whose node does not answer nothing is known.
    """

    def __init__(self, known: Knowledge, loop: Loop, departures: Departures, nodes: Nodes) -> None:
        self._known, self._loop, self._departures, self._nodes = known, loop, departures, nodes
        self._seen: dict[Process, Seen] = {}
        self._unused_since: dict[str, float] = {}  # ids that were handed out and never admitted
        self._asked_at: dict[str, float] = {}  # by node: since when an answer is awaited

    def start(self) -> None:
        self._known.clock.call_later(_EVERY_S, self._tick)

    def beat(self, pipeline_id: str, process: Process, held: frozenset[int]) -> None:
        """A process says that it lives, and which leases it knows that it holds."""
        now = self._known.clock.time()
        job = self._known.jobs[pipeline_id]
        job.heard(process, now)
        caller = job.callers[process]
        caller.held = held
        for status in self._known.state.leases_of(pipeline_id):
            lease = status.lease
            if lease.holder != process or status.state is not LeaseState.ACTIVE or lease.epoch in held:
                caller.unheld.pop(lease.epoch, None)
            elif now - caller.unheld.setdefault(lease.epoch, now) > _UNKNOWN_FOR_S:
                logger.warning("process %d does not know of lease %d, which it asked for", process.pid, lease.epoch)
                self._loop.give_back([lease])

    def _tick(self) -> None:
        known = self._known
        if known.closed:
            return
        known.clock.call_later(_EVERY_S, self._tick)
        now = known.clock.time()
        self._end_unused(now)
        for pipeline_id, job in list(known.jobs.items()):
            if job.ending is None:
                self._judge(pipeline_id, job, now)
        processes = self._processes(now)
        self._seen = {process: seen for process, seen in self._seen.items() if process in processes}
        by_node: dict[str, list[Process]] = {}
        for process in processes:
            by_node.setdefault(process.node_id, []).append(process)
        for node_id, asked in by_node.items():
            if now - self._asked_at.get(node_id, -_ANSWER_S) >= _ANSWER_S:
                self._asked_at[node_id] = now
                self._nodes.states(tuple(asked), partial(self._answered, node_id))

    def _end_unused(self, now: float) -> None:
        """Whoever got an id and died before its pipeline was admitted leaves nobody else who would end it.

        Of an id alone it is not known who got it.
        """
        unused = [pipeline_id for pipeline_id in self._known.state.allocated if pipeline_id not in self._known.jobs]
        self._unused_since = {pipeline_id: self._unused_since.get(pipeline_id, now) for pipeline_id in unused}
        for pipeline_id, since in self._unused_since.items():
            why = self._why_program_over(pipeline_id)
            if not why and now - since > self._known.settings.idle_job_s:
                why = f"it was not admitted within {now - since:.0f} s"
            if why:
                self._departures.end(pipeline_id, why)

    def _processes(self, now: float) -> dict[Process, None]:
        """Programs or their launchers, workers (also those that hold nothing: their job may be waiting for them), and
        silent callers."""
        known, asked = self._known, dict[Process, None]()
        for pipeline_id in known.state.registrations:
            programs = known.state.holders(pipeline_id, "") or known.state.holders(pipeline_id, LAUNCHER)
            asked |= dict.fromkeys(programs.values())
        for pipeline_id, job in known.jobs.items():
            asked |= dict.fromkeys(known.workers(pipeline_id))
            asked |= {p: None for p, caller in job.callers.items() if now - caller.heard_at > _ASK_AFTER_S}
        return asked

    def _answered(self, node_id: str, states: Mapping[Process, str]) -> None:
        known, now = self._known, self._known.clock.time()
        self._asked_at.pop(node_id, None)
        if known.closed:
            return
        for process, state in states.items():
            before = self._seen.get(process)
            since = now if before is None or before.state != state else before.since
            self._seen[process] = Seen(state, since, now)
        gone = {process for process in states if fate(self._seen[process], known.settings)}
        if gone:
            for pipeline_id, job in list(known.jobs.items()):
                if job.ending is None:
                    self._judge(pipeline_id, job, now)

    def _judge(self, pipeline_id: str, job: Job, now: float) -> None:
        """What the fate of its processes and its silence mean for a pipeline."""
        settings = self._known.settings
        if why := self._why_over(pipeline_id, job, now):
            self._departures.end(pipeline_id, why)
            return
        for process, caller in list(job.callers.items()):
            what = fate(self._seen.get(process), settings)
            silent_s = now - caller.heard_at
            if what == _DIED:
                del job.callers[process]
            if not what and silent_s > settings.silent_s:
                what = f"has said nothing for {silent_s:.0f} s"
            if what:
                self._drop(pipeline_id, process, caller, what)
        for process in self._known.workers(pipeline_id):
            if fate(self._seen.get(process), settings) == STOPPED:
                self._end_stopped(pipeline_id, process)

    def _end_stopped(self, pipeline_id: str, worker: Process) -> None:
        """Whether it locks a device or not: its job may be waiting for it. Then its leases are taken. One that survives
        is ended again when it was seen stopped for as long as before."""
        known, why = self._known, f"process {worker.pid} ({worker.name}) {STOPPED}"
        held = [status.lease for status in known.state.leases_of(pipeline_id) if self._is_of(worker, status)]
        told = f"{pipeline_id}: {why}" if held else str(known.note(pipeline_id, why))
        del self._seen[worker]

        def done(survivors: Sequence[Process]) -> None:
            for lease in held:
                self._loop.take(lease, why)

        self._nodes.kill((worker,), told, done)

    def _is_of(self, worker: Process, status: LeaseStatus) -> bool:
        return status.state is not LeaseState.PENDING and worker in self._known.named_holders(status.lease)

    def _why_over(self, pipeline_id: str, job: Job, now: float) -> str:
        """Why a pipeline is over; "" while it is not."""
        known = self._known
        if why := self._why_program_over(pipeline_id):
            return why
        if cluster := known.stranded(pipeline_id):
            return f"all devices of its {cluster} left the pool with their nodes"
        idle_s = now - job.heard_at
        programs = known.state.holders(pipeline_id, "")
        if idle_s <= known.settings.idle_job_s or programs or known.state.leases_of(pipeline_id):
            return ""
        waits = any(request.pipeline_id == pipeline_id for request in known.state.requests.values())
        return "" if waits else f"nothing was heard of it for {idle_s:.0f} s"

    def _why_program_over(self, pipeline_id: str) -> str:
        state, settings = self._known.state, self._known.settings
        programs = state.holders(pipeline_id, "")
        for process in programs.values():
            if what := fate(self._seen.get(process), settings):
                return f"{_PROGRAM} {process.pid}, {what}"
        for process in () if programs else state.holders(pipeline_id, LAUNCHER).values():
            if fate(self._seen.get(process), settings) == _DIED:
                return f"process {process.pid}, which launched it, {_DIED} before its program began"
        return ""

    def _drop(self, pipeline_id: str, process: Process, caller: Caller, what: str) -> None:
        """Ends what a process waited for or held."""
        known, why = self._known, f"process {process.pid}, which held it, {what}"
        for ticket in list(known.gangs.of_pipeline(pipeline_id)):
            request = known.state.requests.get(ticket.request_id)
            if request is not None and request.holder == process:
                logger.warning("nobody waits for request %d of %s any more", request.id, pipeline_id)
                self._loop.withdraw(ticket)
        for status in known.state.leases_of(pipeline_id):
            if status.lease.holder == process or status.lease.epoch in caller.held:
                self._loop.take(status.lease, why)
