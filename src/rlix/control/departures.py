"""How pipelines end: first the program, which would start its workers again, then these, then the leases."""

import logging
from collections.abc import Sequence
from functools import partial

from rlix.control.job import Departure
from rlix.control.knowledge import Knowledge
from rlix.control.loop import ANSWER_S, Loop
from rlix.control.ports import Nodes
from rlix.control.reconcile import taken
from rlix.protocol.errors import PipelineGoneError
from rlix.protocol.events import PipelineEnding, PipelineUnregistered
from rlix.protocol.messages import LeaseState, Process, ReleaseReason

logger = logging.getLogger(__name__)


class Departures:
    """Each step may be taken again; what is ending after a restart goes on from the first."""

    def __init__(self, known: Knowledge, loop: Loop, nodes: Nodes) -> None:
        self._known, self._loop, self._nodes = known, loop, nodes
        loop.depart, loop.ended = self.depart, self._ended

    def end(self, pipeline_id: str, why: str, spare: Process | None = None) -> None:
        """Ends a pipeline: refuses its requests, ends its program and its workers, then frees its devices.

        They are told why, unless it ends by its own word. Saying it again tries again. A pipeline with quarantined
        devices is there until they are free.
        """
        known = self._known
        job = known.jobs.get(pipeline_id)
        if job is None:
            if pipeline_id in known.state.allocated:  # else it has ended since somebody wanted that
                known.record(PipelineUnregistered(pipeline_id, why))
            return
        programs = known.state.holders(pipeline_id, "").values()
        told = "" if spare is not None and (spare in programs or spare in job.callers) else why or "unregistered"
        if pipeline_id not in known.state.ending:
            logger.log(logging.WARNING if told else logging.INFO, "pipeline %s ends: %s", pipeline_id, why)
            told = told and str(known.note(pipeline_id, told))
            for ticket in known.gangs.of_pipeline(pipeline_id):
                if ticket.outcome is None:
                    text = f"pipeline {pipeline_id!r} was ended while it waited for {ticket.cluster.name!r}"
                    self._loop.withdraw(ticket, PipelineGoneError(f"{text}: {why or 'unregistered'}"))
            known.record(PipelineEnding(pipeline_id, why, spare))
        if job.ending is None or job.ending.ended == 2:
            job.ending = Departure(told, spare)
        clusters = known.state.registrations[pipeline_id].clusters
        self.depart(pipeline_id)
        for cluster in clusters:
            known.wake(pipeline_id, cluster.name)

    def depart(self, pipeline_id: str) -> None:
        """The next step of a pipeline's end: its program, its workers, its leases."""
        known = self._known
        job = known.jobs.get(pipeline_id)
        if job is None or job.ending is None or known.now < job.ending.awaited_by:
            return
        departure = job.ending
        if departure.ended < 2:
            departure.awaited_by = known.now + ANSWER_S
            known.alarm.set(pipeline_id, departure.awaited_by)
            # Anybody may name any process as its own: whoever is another pipeline's, too, goes on with that.
            spared = {departure.spare, *known.of_others(pipeline_id)}
            victims = [p for p in self._to_end(pipeline_id, departure) if p not in spared]
            self._nodes.kill(victims, departure.told, partial(self._departed, pipeline_id, departure, departure.ended))
            return
        why = known.state.ending[pipeline_id]
        epochs = [status.lease.epoch for status in known.state.leases_of(pipeline_id)]
        for epoch in epochs:
            hold = known.hold(epoch)
            if hold.leaving is None or hold.leaving.given or hold.leaving.kill_from > known.now:
                known.holds[epoch] = taken(hold, why, ReleaseReason.UNREGISTERED, departure.told, known.now)
            elif known.now >= hold.awaited_by:
                self._loop.look_again(epoch)
        self._loop.turn(epochs)
        self._ended(pipeline_id)

    def _to_end(self, pipeline_id: str, departure: Departure) -> list[Process]:
        """The program goes first: it would start its workers again."""
        if departure.ended == 0:
            return list(self._known.state.holders(pipeline_id, "").values())
        return self._known.workers(pipeline_id)

    def _departed(self, pipeline_id: str, departure: Departure, step: int, survivors: Sequence[Process]) -> None:
        """Whoever is left of them and keeps devices, the locks tell."""
        job = self._known.jobs.get(pipeline_id)
        if job is None or job.ending is not departure or departure.ended != step or self._known.closed:
            return
        departure.ended += 1
        departure.awaited_by = 0.0
        self.depart(pipeline_id)

    def _ended(self, pipeline_id: str) -> None:
        """A pipeline that has no lease any more is forgotten; those that wait for that hear of it."""
        known = self._known
        if pipeline_id not in known.state.ending:
            return
        departure = known.jobs[pipeline_id].ending
        if departure is None or departure.ended < 2:
            return
        left = known.state.leases_of(pipeline_id)
        departure.tried = all(status.state is LeaseState.QUARANTINED for status in left)
        if not left:
            known.record(PipelineUnregistered(pipeline_id, known.state.ending[pipeline_id]))
        known.wake(pipeline_id)
