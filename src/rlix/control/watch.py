"""Once a second: who does not speak any more, who was stopped, who does not know what it holds."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlix.control.job import Caller, Job
from rlix.protocol.messages import LeaseState, Process

if TYPE_CHECKING:
    from rlix.control.core import Core

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_ASK_AFTER_S = 3.0  # of silence; callers beat once a second
_ANSWER_S = 60.0  # for every node to say what its processes do; then they are asked again
_UNKNOWN_FOR_S = 10.0  # that a lease may be unknown to the process that asked for it: an answer may be on its way


class Watch:
    """Looks at the processes behind leases, and ends what nobody will give back."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self._stopped_at: dict[Process, float] = {}
        self._unused_since: dict[str, float] = {}  # ids that were handed out and never admitted
        self._asked_at: float | None = None  # since when an answer is awaited

    def start(self) -> None:
        self._core.clock.call_later(_EVERY_S, self._tick)

    def beat(self, pipeline_id: str, process: Process, held: frozenset[int]) -> None:
        """A process says that it lives, and which leases it knows that it holds."""
        now = self._core.clock.time()
        job = self._core.jobs[pipeline_id]
        job.heard(process, now)
        caller = job.callers[process]
        caller.held = held
        for status in self._core.state.leases_of(pipeline_id):
            lease = status.lease
            if lease.holder != process or status.state is not LeaseState.ACTIVE or lease.epoch in held:
                caller.unheld.pop(lease.epoch, None)
            elif now - caller.unheld.setdefault(lease.epoch, now) > _UNKNOWN_FOR_S:
                logger.warning("process %d does not know of lease %d, which it asked for", process.pid, lease.epoch)
                self._core.endings.given_back(lease)

    def _tick(self) -> None:
        core = self._core
        if core.closed:
            return
        core.clock.call_later(_EVERY_S, self._tick)
        now = core.clock.time()
        for pipeline_id, job in list(core.jobs.items()):
            if self._is_idle(pipeline_id, job, now):
                core.endings.end(pipeline_id, f"nothing was heard of it for {now - job.heard_at:.0f} s")
        self._end_unused(now)
        if self._asked_at is not None and now - self._asked_at < _ANSWER_S:
            return  # a node is slow to answer
        asked = self._processes(now)
        self._stopped_at = {process: at for process, at in self._stopped_at.items() if process in asked}
        if asked:
            self._asked_at = now
            core.nodes.states(tuple(asked), self._seen)

    def _end_unused(self, now: float) -> None:
        """Whoever got an id and died before its pipeline was admitted leaves nobody else who would end it."""
        unused = [pipeline_id for pipeline_id in self._core.state.allocated if pipeline_id not in self._core.jobs]
        self._unused_since = {pipeline_id: self._unused_since.get(pipeline_id, now) for pipeline_id in unused}
        for pipeline_id, since in self._unused_since.items():
            if now - since > self._core.settings.idle_job_s:
                why = f"it was not admitted within {now - since:.0f} s"
                self._core.endings.end(pipeline_id, why)

    def _is_idle(self, pipeline_id: str, job: Job, now: float) -> bool:
        """A pipeline without a program lives as long as it uses the control plane."""
        state = self._core.state
        if job.ending or state.holders(pipeline_id, "") or state.leases_of(pipeline_id):
            return False
        waits = any(request.pipeline_id == pipeline_id for request in state.requests.values())
        return not waits and now - job.heard_at > self._core.settings.idle_job_s

    def _processes(self, now: float) -> dict[Process, None]:
        """Programs, workers of clusters that hold something, and callers that are silent."""
        core, asked = self._core, dict[Process, None]()
        for pipeline_id, job in core.jobs.items():
            asked |= dict.fromkeys(core.state.holders(pipeline_id, "").values())
            asked |= {p: None for p, caller in job.callers.items() if now - caller.heard_at > _ASK_AFTER_S}
        for status in core.state.leases.values():
            asked |= dict.fromkeys(core.endings.named_holders(status.lease))
        return asked

    def _seen(self, states: Mapping[Process, str]) -> None:
        self._asked_at = None
        core, now = self._core, self._core.clock.time()
        stopped = set()
        for process, state in states.items():
            if state == "stopped":
                since = self._stopped_at.setdefault(process, now)
                if now - since >= core.settings.stopped_s:
                    stopped.add(process)
            else:
                self._stopped_at.pop(process, None)
        dead = {process for process, state in states.items() if state == "dead"}
        for pipeline_id, job in list(core.jobs.items()):
            if not job.ending:
                self._judge_job(pipeline_id, job, dead, stopped, now)
        for status in list(core.state.leases.values()):
            if status.state in (LeaseState.ACTIVE, LeaseState.DRAINING):
                for process in core.endings.named_holders(status.lease):
                    if process in stopped:
                        why = f"process {process.pid} ({process.name}) was stopped (SIGSTOP) and did not go on"
                        core.endings.take(status.lease, why)

    def _judge_job(self, pipeline_id: str, job: Job, dead: set[Process], stopped: set[Process], now: float) -> None:
        core = self._core
        for process in core.state.holders(pipeline_id, "").values():
            what = (
                "died" if process in dead else "was stopped (SIGSTOP) and did not go on" if process in stopped else ""
            )
            if what:
                core.endings.end(pipeline_id, f"its program, process {process.pid}, {what}")
                return
        for process, caller in list(job.callers.items()):
            silent_s = now - caller.heard_at
            if process in dead:
                del job.callers[process]
                self._drop(pipeline_id, process, caller, "died")
            elif process in stopped:
                self._drop(pipeline_id, process, caller, "was stopped (SIGSTOP) and did not go on")
            elif silent_s > core.settings.silent_s:
                self._drop(pipeline_id, process, caller, f"has said nothing for {silent_s:.0f} s")

    def _drop(self, pipeline_id: str, process: Process, caller: Caller, what: str) -> None:
        """Ends what a process waited for or held."""
        core, why = self._core, f"process {process.pid}, which held it, {what}"
        for request in list(core.state.requests.values()):
            ticket = core.gangs.request(request.id)
            if request.holder == process and ticket is not None:
                core.abandon(ticket)
        for status in core.state.leases_of(pipeline_id):
            if status.lease.holder == process or status.lease.epoch in caller.held:
                core.endings.take(status.lease, why)
