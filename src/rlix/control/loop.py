"""Looks at what leases, requests and pipelines need next, and does it: the only code that acts on nodes."""

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rlix.control.explain import Line, behind, can_run, left, wanted
from rlix.control.gang_queue import Ticket
from rlix.control.knowledge import Knowledge
from rlix.control.planning import Planning
from rlix.control.ports import Nodes
from rlix.control.reconcile import (
    AskBack,
    Drain,
    Free,
    Kill,
    Look,
    Note,
    Quarantine,
    Release,
    Rest,
    Sight,
    Take,
    given_back,
    looked_at,
    reconcile,
    taken,
    unused,
)
from rlix.protocol.errors import PipelineGoneError, RlixError, StaleEpochError, WaitTimeoutError
from rlix.protocol.events import (
    DevicesReleased,
    DrainStarted,
    GangCancelled,
    GrantRevoked,
    LeaseQuarantined,
    LeaseReleased,
)
from rlix.protocol.messages import Device, Ending, Lease, LeaseState, Occupant, Process, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.gang_order import gang_order

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # for a node to answer; then it is asked again


class Loop:
    """A turn asks of each lease what is next, until what is next is to wait. Everything it does may be done again, so
    the first turn after a restart is a turn like any other.

    `depart` is told of a pipeline that is due for the next step of its end, `ended` of one of whose leases one has
    ended or is quarantined.
    """

    def __init__(self, known: Knowledge, planning: Planning, nodes: Nodes, pool: str) -> None:
        self._known, self._planning, self._nodes, self._pool = known, planning, nodes, pool
        self.depart: Callable[[str], None] = lambda pipeline_id: None
        self.ended: Callable[[str], None] = lambda pipeline_id: None
        known.alarm.ring = self._rung

    def _rung(self, keys: list[Hashable]) -> None:
        """The moment of these has come."""
        if self._known.closed:
            return
        self.turn([key for key in keys if isinstance(key, int)])
        for key in keys:
            match key:
                case str():
                    self.depart(key)
                case ("request", int(request_id)):
                    if (ticket := self._known.gangs.request(request_id)) is not None:
                        self.request_turn(ticket)
                case ("gap", str(pipeline_id)):
                    job = self._known.jobs.get(pipeline_id)
                    if job is not None and not job.rolling:  # what was kept went when it rolled out again
                        self._planning.soon()
                case ("pause", str()):
                    self._planning.soon()

    # -- leases ------------------------------------------------------------------------------------------------------

    def turn(self, epochs: Iterable[int]) -> None:
        """What can be done at once for these leases is done; those that are free are released in one change."""
        looks: list[Lease] = []
        kills: list[tuple[Lease, Kill]] = []
        free: dict[Lease, ReleaseReason] = {}
        for epoch in epochs:
            while (status := self._known.state.leases.get(epoch)) is not None:
                lease = status.lease
                match reconcile(status, self._known.hold(epoch), self._known.now, self._known.settings):
                    case Rest(until):
                        self._known.alarm.set(epoch, until)
                    case Look():
                        looks.append(lease)
                    case Kill() as kill:
                        kills.append((lease, kill))
                    case Release(reason):
                        free[lease] = reason
                    case Drain(why):
                        self._known.record(DrainStarted(epoch, why))
                        continue
                    case Take(why):
                        self._begin_to_take(lease, why, ReleaseReason.KILLED)
                        continue
                    case Note():
                        self.noted(lease)
                        continue
                    case AskBack(why):
                        self._ask_back(lease, why)
                        continue
                    case Free(devices):
                        self._free(lease, devices)
                        continue
                    case Quarantine(why, pause_s):
                        self._quarantine(lease, why, pause_s)
                        continue
                break
        self._release(free)
        self._look(looks)
        for lease, kill in kills:
            self._kill(lease, kill)

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Their holder says that its bytes are gone from the devices of these leases."""
        known = self._known
        for lease in leases:
            status = known.state.leases.get(lease.epoch)
            if status is not None:
                known.holds[lease.epoch] = given_back(status, known.hold(lease.epoch), known.now, known.settings)
        self.turn([lease.epoch for lease in leases])

    def take(self, lease: Lease, why: str, reason: ReleaseReason = ReleaseReason.KILLED) -> None:
        """Ends a lease without its holder's help. Once is enough."""
        known = self._known
        status = known.state.leases.get(lease.epoch)
        if status is None or status.state is LeaseState.QUARANTINED:
            return
        leaving = known.hold(lease.epoch).leaving
        if leaving is None or leaving.given or leaving.kill_from > known.now:
            self._begin_to_take(status.lease, why, reason)  # with the devices that it has now
            self.turn([lease.epoch])

    def node_lost(self, lease: Lease) -> None:
        """Some of its devices have left the pool, with whatever was on them."""
        self.take(lease, "its node left the pool", ReleaseReason.NODE_LOST)
        self.look_again(lease.epoch)
        self.turn([lease.epoch])

    def look_again(self, epoch: int) -> None:
        """At a lease that is leaving, whatever was seen of it before."""
        hold = self._known.hold(epoch)
        if hold.leaving is not None:
            self._known.holds[epoch] = looked_at(hold, self._known.now)

    def _begin_to_take(self, lease: Lease, why: str, reason: ReleaseReason) -> None:
        known = self._known
        status = known.state.leases[lease.epoch]
        told = ""
        if status.state is not LeaseState.PENDING:
            told = str(self._note_failure(lease, why))
        if status.state is LeaseState.ACTIVE:
            known.record(DrainStarted(lease.epoch, why))
        known.holds[lease.epoch] = taken(known.hold(lease.epoch), why, reason, told, known.now)
        known.wake(lease.epoch)
        if lease.phase is Phase.ROLLOUT:
            known.wake(lease.pipeline_id, lease.cluster)

    def _ask_back(self, lease: Lease, why: str) -> None:
        """Its rollout gets nothing more until it asks what it has."""
        known = self._known
        job = known.jobs.get(lease.pipeline_id)
        if job is not None:
            job.deaf.add(lease.cluster)
        self._note_failure(lease, why)
        known.record(DrainStarted(lease.epoch, why))
        known.holds[lease.epoch] = unused(known.hold(lease.epoch), why, known.now, known.settings)
        known.wake(lease.pipeline_id, lease.cluster)

    def noted(self, lease: Lease) -> None:
        """Its rollout knows of a bundle, or is seen to use it."""
        known = self._known
        hold = known.hold(lease.epoch)
        if hold.note_by < math.inf:
            known.holds[lease.epoch] = replace(hold, note_by=math.inf)
            known.jobs[lease.pipeline_id].succeeded()
            known.alarm.cancel(lease.epoch)

    def _free(self, lease: Lease, devices: tuple[int, ...]) -> None:
        known = self._known
        hold = known.hold(lease.epoch)
        known.holds[lease.epoch] = replace(hold, parts=hold.parts[1:], sight=None)
        if devices:
            known.record(DevicesReleased(lease.epoch, devices))
            self._left(devices)
        known.wake(lease.epoch)

    def _quarantine(self, lease: Lease, why: str, pause_s: float) -> None:
        known, now = self._known, self._known.now
        hold, status = known.hold(lease.epoch), known.state.leases[lease.epoch]
        assert hold.leaving is not None
        told = hold.leaving.told if hold.leaving.told is not None else str(self._note_failure(lease, why))
        leaving = replace(
            hold.leaving, why=why.partition("; and ")[0], look_from=now + pause_s, kill_from=now + pause_s, given=False
        )
        known.holds[lease.epoch] = replace(
            hold, leaving=replace(leaving, told=told), sight=None, killed=False, pause_s=pause_s
        )
        if (status.state, status.reason) != (LeaseState.QUARANTINED, why):
            logger.error("devices %s are quarantined: %s", list(lease.devices), why)
            revoked = known.state.successors(lease.devices)
            known.record(*(GrantRevoked(epoch) for epoch in revoked), LeaseQuarantined(lease.epoch, why))
        known.wake(lease.epoch)
        self.ended(lease.pipeline_id)

    def give_up(self, device_id: int) -> tuple[Lease, ...]:
        """A person says that a quarantined device is free: ends the leases that keep it. Returns them."""
        quarantined = [
            status.lease
            for status in self._known.state.leases.values()
            if status.state is LeaseState.QUARANTINED and device_id in status.lease.devices
        ]
        self._release(dict.fromkeys(quarantined, ReleaseReason.GIVEN_UP))
        return tuple(quarantined)

    def _release(self, leases: Mapping[Lease, ReleaseReason]) -> None:
        """In one change, which makes those active that wait for any of the devices."""
        if not leases:
            return
        known = self._known
        for lease, reason in leases.items():
            hold = known.hold(lease.epoch)
            leaving, job = hold.leaving, known.jobs.get(lease.pipeline_id)
            if job is not None and leaving is not None and not leaving.given and hold.note_by < math.inf:
                job.deaf.add(lease.cluster)  # until it asks what it has
            if reason is ReleaseReason.KILLED and leaving is not None and leaving.told is None:
                self._note_failure(lease, leaving.why)
        known.record(*(LeaseReleased(lease.epoch, reason) for lease, reason in leases.items()))
        self._left(device for lease in leases for device in lease.devices)
        for lease, reason in leases.items():
            known.wake(lease.epoch)
            by_its_word = reason in (ReleaseReason.RELEASED, ReleaseReason.SHRUNK)
            if lease.phase is Phase.ROLLOUT and not by_its_word:  # else it would be told what it has said
                known.wake(lease.pipeline_id, lease.cluster)
        for pipeline_id in {lease.pipeline_id: None for lease in leases}:
            self.ended(pipeline_id)

    def _left(self, freed: Iterable[int]) -> None:
        if self._known.state.on_draining(freed):
            self.withdraw_impossible()

    def _note_failure(self, lease: Lease, why: str) -> Ending:
        """Its rollout gets no further bundle for a while."""
        known = self._known
        ending = known.note(lease.pipeline_id, why, lease)
        logger.warning("lease %d is taken back: %s", lease.epoch, ending)
        job = known.jobs.get(lease.pipeline_id)
        if lease.phase is Phase.ROLLOUT and job is not None and job.ending is None:
            known.alarm.set(("pause", lease.pipeline_id), job.failed(known.clock.time()))
        return ending

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _look(self, leases: Sequence[Lease]) -> None:
        """Those on the same nodes together; a node that does not answer holds up its own only."""
        known, now = self._known, self._known.now
        by_nodes: dict[frozenset[str], list[Lease]] = {}
        for lease in leases:
            known.holds[lease.epoch] = replace(known.hold(lease.epoch), awaited_by=now + ANSWER_S)
            known.alarm.set(lease.epoch, now + ANSWER_S)
            nodes = frozenset(device.node_id for device in self._devices(lease))
            by_nodes.setdefault(nodes, []).append(lease)
        for group in by_nodes.values():
            devices = [device for lease in group for device in self._devices(lease)]
            self._nodes.occupied(devices, partial(self._seen, tuple(group), now))

    def _seen(self, leases: Sequence[Lease], asked_at: float, occupants: Sequence[Occupant]) -> None:
        known = self._known
        if known.closed:
            return
        ours = [occupant for occupant in occupants if occupant.pool == self._pool]
        for lease in leases:
            hold = known.hold(lease.epoch)
            if lease.epoch in known.state.leases:
                there = tuple(o for o in ours if o.device_id in lease.devices and o.epoch <= lease.epoch)
                known.holds[lease.epoch] = replace(hold, sight=Sight(asked_at, known.now, there), awaited_by=0.0)
        self.turn([lease.epoch for lease in leases])

    def _kill(self, lease: Lease, kill: Kill) -> None:
        known, now = self._known, self._known.now
        hold = known.hold(lease.epoch)
        leaving = hold.leaving
        assert leaving is not None
        told = leaving.told
        if told is None:
            told = str(self._note_failure(lease, kill.why))
        outside = leaving.reason in (ReleaseReason.UNREGISTERED, ReleaseReason.NODE_LOST)
        reason = leaving.reason if outside else ReleaseReason.KILLED
        # Who can be told is told once.
        leaving = replace(leaving, why=kill.why, reason=reason, given=False, told="")
        known.holds[lease.epoch] = replace(hold, leaving=leaving, awaited_by=now + ANSWER_S)
        known.alarm.set(lease.epoch, now + ANSWER_S)
        self._nodes.kill(kill.processes, told, partial(self._killed, lease), self._devices(lease))

    def _killed(self, lease: Lease, survivors: Sequence[Process]) -> None:
        """Whoever is left of them, the locks tell."""
        known = self._known
        if known.closed or lease.epoch not in known.state.leases:
            return
        hold = known.hold(lease.epoch)
        known.holds[lease.epoch] = replace(hold, killed=True, sight=None, awaited_by=0.0)
        self.turn([lease.epoch])

    def _devices(self, lease: Lease) -> list[Device]:
        """Those that have not left the pool."""
        return [device for d in lease.devices if (device := self._known.state.device(d)) is not None]

    # -- requests ----------------------------------------------------------------------------------------------------

    def await_request(self, ticket: Ticket) -> None:
        """Its moments were set."""
        self._known.alarm.set(("request", ticket.request_id), min(ticket.expires_at, ticket.forget_at))

    def request_turn(self, ticket: Ticket) -> None:
        """A request ends when its caller has waited as long as it wanted, or does not ask any more."""
        known = self._known
        if ticket.outcome is not None:
            return
        if known.now >= ticket.expires_at:
            what = f"{ticket.pipeline_id}/{ticket.cluster.name} for {ticket.phase.name}"
            text = f"devices {wanted(known.state, ticket)} were not granted to {what} within {ticket.timeout_s:g} s"
            line = Line(gang_order(known.state.snapshot(known.clock.time())))
            stuck = known.writer.trouble
            self.withdraw(ticket, WaitTimeoutError(f"{text}; {behind(known.state, ticket, line, stuck)}"))
        elif known.now >= ticket.forget_at:
            logger.warning("nobody waits for request %d of %s any more", ticket.request_id, ticket.pipeline_id)
            self.withdraw(ticket)
        else:
            self.await_request(ticket)

    def withdraw_impossible(self) -> None:
        """Ends the requests none of whose choices is in the pool."""
        for ticket in list(self._known.gangs.waiting()):
            if not can_run(self._known.state, ticket):
                self.withdraw(ticket, PipelineGoneError(left(self._known.state, ticket)))

    def withdraw(self, ticket: Ticket, error: RlixError | None = None) -> None:
        """Ends a request, waiting or granted, for which nobody will use the lease."""
        known = self._known
        if ticket.request_id in known.state.requests:
            known.record(GangCancelled(ticket.request_id))
        elif ticket.epoch is not None and ticket.epoch in known.state.leases:
            self.give_back([known.state.leases[ticket.epoch].lease])
        text = f"the request of {ticket.pipeline_id}/{ticket.cluster.name} was withdrawn"
        ticket.decide(error or StaleEpochError(text))
        known.gangs.close(ticket)
        known.alarm.cancel(("request", ticket.request_id))
