"""How leases and pipelines end: a device passes on when its holder's bytes are gone or its holder is dead."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rlix.protocol.errors import PipelineGoneError
from rlix.protocol.events import (
    DevicesReleased,
    DrainStarted,
    GrantRevoked,
    LeaseQuarantined,
    LeaseReleased,
    PipelineEnding,
    PipelineUnregistered,
)
from rlix.protocol.messages import Device, Ending, Lease, LeaseState, Occupant, Process, ReleaseReason
from rlix.protocol.types import Phase

if TYPE_CHECKING:
    from rlix.control.core import Core

logger = logging.getLogger(__name__)

KEPT_ENDINGS = 20
_LOOK_AGAIN_S = 0.02
_LONGEST_PAUSE_S = 60.0


class Endings:
    """Nobody's word is enough for a device: who gives a lease back is believed when the device's lock is free too.

    Whoever does not give it back is ended, and a device that is locked even then is quarantined and looked at again.
    `last` are the latest ends that nobody asked for, or somebody else: for people, and not over a restart.
    """

    def __init__(self, core: "Core") -> None:
        self._core = core
        self.last: deque[Ending] = deque(maxlen=KEPT_ENDINGS)
        self._taking: set[int] = set()  # epochs whose holders are being ended right now
        self._quarantine_s: dict[int, float] = {}  # by epoch: the pause before the next look

    # -- a holder gives back -----------------------------------------------------------------------------------------

    def given_back(self, *leases: Lease) -> None:
        """Their holder says that its bytes are gone from the devices of these leases.

        Those whose devices are free are released in one change. A node that does not answer holds up its own only.
        """
        core, by_nodes = self._core, dict[frozenset[str], dict[Lease, ReleaseReason]]()
        for lease in leases:
            status = core.state.leases.get(lease.epoch)
            if status is None or lease.epoch in self._taking:
                continue
            if status.state is LeaseState.PENDING:
                self._release({lease: ReleaseReason.RELEASED})
                continue
            shrunk = lease.phase is Phase.ROLLOUT and status.state is LeaseState.DRAINING
            nodes = frozenset(device.node_id for device in self._devices(lease))
            by_nodes.setdefault(nodes, {})[lease] = ReleaseReason.SHRUNK if shrunk else ReleaseReason.RELEASED
        until = core.clock.time() + core.settings.release_grace_s
        for given in by_nodes.values():
            self._look(given, partial(self._seen_after_word, given, until))

    def _seen_after_word(
        self, given: Mapping[Lease, ReleaseReason], until: float, there: Mapping[int, Sequence[Occupant]]
    ) -> None:
        core = self._core
        given = {
            lease: reason
            for lease, reason in given.items()
            if lease.epoch in core.state.leases and lease.epoch not in self._taking
        }
        self._release({lease: reason for lease, reason in given.items() if not there[lease.epoch]})
        locked = {lease: reason for lease, reason in given.items() if there[lease.epoch]}
        late = core.clock.time() >= until
        for lease in locked:
            why = f"its holder says that its bytes are gone, but {_describe(there[lease.epoch])}"
            if late:
                self.take(lease, why)
            elif core.state.leases[lease.epoch].state is LeaseState.ACTIVE:
                core.record(DrainStarted(lease.epoch, why))
        if locked and not late:
            again = partial(self._look, locked, partial(self._seen_after_word, locked, until))
            core.clock.call_later(_LOOK_AGAIN_S, again)

    def part_given_back(self, lease: Lease, devices: Sequence[int], done: Callable[[], object]) -> None:
        """The holder of a gang says that its bytes are gone from these of its devices, and keeps the others.

        If a part stays locked the whole lease is taken. `done` is called when the part is free, or all of the lease
        ends. A control plane that is restarted before that forgets the word, and is asked again by who waits.
        """
        until = self._core.clock.time() + self._core.settings.release_grace_s
        self._look_at_part(replace(lease, devices=tuple(devices)), until, done)

    def _look_at_part(self, part: Lease, until: float, done: Callable[[], object]) -> None:
        self._look((part,), lambda there: self._seen_of_part(part, until, done, there[part.epoch]))

    def _seen_of_part(self, part: Lease, until: float, done: Callable[[], object], there: Sequence[Occupant]) -> None:
        core = self._core
        status = core.state.leases.get(part.epoch)
        if status is not None and status.state is LeaseState.ACTIVE:  # else all of it ends
            given = tuple(device for device in part.devices if device in status.lease.devices)  # or it was said twice
            if given and len(given) < len(status.lease.devices):  # else the last one goes with the lease
                if there and core.clock.time() < until:
                    core.clock.call_later(_LOOK_AGAIN_S, partial(self._look_at_part, part, until, done))
                    return
                if there:
                    self.take(status.lease, f"its holder says that its bytes are gone, but {_describe(there)}")
                else:
                    core.record(DevicesReleased(part.epoch, given))
        done()

    # -- a lease is taken --------------------------------------------------------------------------------------------

    def take(self, lease: Lease, why: str, *, reason: ReleaseReason = ReleaseReason.KILLED) -> None:
        """Ends a lease without its holder's help: its processes are ended first, then its devices are free."""
        core = self._core
        status = core.state.leases.get(lease.epoch)
        if status is None or lease.epoch in self._taking:
            return
        if status.state is LeaseState.PENDING:
            self._release({lease: reason})
            return
        lease = status.lease  # with the devices that it has now
        self._taking.add(lease.epoch)
        ending = self._note(lease.pipeline_id, why, lease)
        logger.warning("lease %d is taken back: %s", lease.epoch, ending)
        if status.state is LeaseState.ACTIVE:
            core.record(DrainStarted(lease.epoch, why))
        job = core.jobs.get(lease.pipeline_id)
        if lease.phase is Phase.ROLLOUT and job is not None and not job.ending:
            core.clock.call_later(job.failed(core.clock.time()), core.planning.soon)
            core.rollouts.ended(lease)
        # Whoever asked for devices of a node that left may be on another one, and has no byte there any more.
        holders = self.named_holders(lease) if reason is ReleaseReason.NODE_LOST else self.holders(lease)
        self._kill_holders(lease, holders, str(ending), partial(self._seen_after_death, lease, why, reason))

    def why(self, epoch: int) -> str:
        """Why a lease was taken; "" when it was not, or long ago."""
        return next((ending.why for ending in self.last if ending.epoch == epoch), "")

    def _note(self, pipeline_id: str, why: str, lease: Lease | None = None) -> Ending:
        core = self._core
        registration = core.state.registrations.get(pipeline_id)
        of_lease = (lease.epoch, lease.cluster, lease.devices) if lease else ()
        self.last.append(Ending(core.wall(), pipeline_id, registration.name if registration else "", why, *of_lease))
        return self.last[-1]

    def holders(self, lease: Lease) -> tuple[Process, ...]:
        """The processes that keep bytes under the lease: those named, or else those that took it."""
        if named := self.named_holders(lease):
            return named
        if lease.holder is not None:
            return (lease.holder,)
        job = self._core.jobs.get(lease.pipeline_id)
        return tuple(p for p, caller in job.callers.items() if lease.epoch in caller.held) if job else ()

    def named_holders(self, lease: Lease) -> tuple[Process, ...]:
        """The processes that were named to keep bytes under the lease."""
        named = self._core.state.holders(lease.pipeline_id, lease.cluster)
        if lease.bundle is not None:
            return (named[lease.bundle],) if lease.bundle in named else ()
        return tuple(named.values())

    def _kill_holders(
        self,
        lease: Lease,
        named: Sequence[Process],
        told: str,
        done: Callable[[Sequence[Process], Sequence[Occupant]], None],
    ) -> None:
        """Ends the named processes, then whoever still locks the devices under this lease."""
        core = self._core

        def after_named(survivors: tuple[Process, ...]) -> None:
            self._look((lease,), lambda there: after_look(survivors, there[lease.epoch]))

        def after_look(survivors: tuple[Process, ...], there: Sequence[Occupant]) -> None:
            found = tuple({process: None for occupant in there for process in occupant.processes})
            if not found:
                done(survivors, there)
                return
            core.nodes.kill(found, told, lambda left: after_all((*survivors, *left)))

        def after_all(survivors: tuple[Process, ...]) -> None:
            self._look((lease,), lambda there: done(survivors, there[lease.epoch]))

        core.nodes.kill(tuple(named), told, after_named)

    def _seen_after_death(
        self,
        lease: Lease,
        why: str,
        reason: ReleaseReason,
        survivors: Sequence[Process],
        there: Sequence[Occupant],
    ) -> None:
        self._taking.discard(lease.epoch)
        if lease.epoch not in self._core.state.leases:
            return
        if there or survivors:
            left = _describe(there) if there else _describe_processes(survivors)
            self._quarantine(lease, f"{why}; and {left}, although it was killed")
        else:
            self._quarantine_s.pop(lease.epoch, None)
            self._release({lease: reason})

    # -- quarantine --------------------------------------------------------------------------------------------------

    def _quarantine(self, lease: Lease, why: str) -> None:
        core = self._core
        revoked = core.state.successors(lease.devices)
        logger.error("devices %s are quarantined: %s", list(lease.devices), why)
        core.record(*(GrantRevoked(epoch) for epoch in revoked), LeaseQuarantined(lease.epoch, why))
        pause_s = self._quarantine_s.get(lease.epoch, core.settings.quarantine_retry_s)
        self._quarantine_s[lease.epoch] = min(2 * pause_s, _LONGEST_PAUSE_S)
        core.clock.call_later(pause_s, partial(self._try_again, lease))

    def _try_again(self, lease: Lease) -> None:
        status = self._core.state.leases.get(lease.epoch)
        if status is None or lease.epoch in self._taking:
            return
        self._taking.add(lease.epoch)
        done = partial(self._seen_after_death, lease, _first(status.reason), ReleaseReason.KILLED)
        self._kill_holders(lease, self.holders(lease), "", done)  # who can be told has been

    def give_up(self, device_id: int) -> tuple[Lease, ...]:
        """A person says that a quarantined device is free: ends the leases that keep it. Returns them."""
        quarantined = [
            status.lease
            for status in self._core.state.leases.values()
            if status.state is LeaseState.QUARANTINED and device_id in status.lease.devices
        ]
        for lease in quarantined:
            self._quarantine_s.pop(lease.epoch, None)
            self._release({lease: ReleaseReason.GIVEN_UP})
        return tuple(quarantined)

    # -- a pipeline ends ---------------------------------------------------------------------------------------------

    def end(
        self, pipeline_id: str, why: str, *, spare: Process | None = None, done: Callable[[], object] = lambda: None
    ) -> None:
        """Ends a pipeline: refuses its requests, ends its program and its workers, then frees its devices.

        They are told why, unless it ends by its own word.

        Saying it again tries again. `spare` is the process that says so: it is not ended, unless it keeps devices
        locked. `done` is called when that has been tried; a pipeline with quarantined devices is there until they are
        free.
        """
        core = self._core
        job = core.jobs.get(pipeline_id)
        if job is None:
            if pipeline_id in core.state.allocated:  # else it has ended since somebody wanted that
                core.record(PipelineUnregistered(pipeline_id, why))
            done()
            return
        programs = core.state.holders(pipeline_id, "").values()
        told = "" if spare is not None and (spare in programs or spare in job.callers) else why or "unregistered"
        if pipeline_id not in core.state.ending:
            logger.log(logging.WARNING if told else logging.INFO, "pipeline %s ends: %s", pipeline_id, why)
            told = told and str(self._note(pipeline_id, told))
            for ticket in core.gangs.of_pipeline(pipeline_id):
                if ticket.outcome is None:
                    text = f"pipeline {pipeline_id!r} was ended while it waited for {ticket.cluster.name!r}"
                    core.withdraw(ticket, PipelineGoneError(f"{text}: {why or 'unregistered'}"))
            core.record(PipelineEnding(pipeline_id, why))
        job.ending = True
        registration = core.state.registrations[pipeline_id]
        workers = [
            process
            for cluster in registration.clusters
            for process in core.state.holders(pipeline_id, cluster.name).values()
            if process != spare
        ]

        def after_workers(_: Sequence[Process]) -> None:
            self._end_leases(pipeline_id, why, told, spare, done)

        # The program goes first: it would start its workers again.
        core.nodes.kill(
            [p for p in programs if p != spare], told, lambda _: core.nodes.kill(workers, told, after_workers)
        )
        for cluster in registration.clusters:
            core.rollouts.wake(pipeline_id, cluster.name)

    def _end_leases(
        self, pipeline_id: str, why: str, told: str, spare: Process | None, done: Callable[[], object]
    ) -> None:
        leases = [s.lease for s in self._core.state.leases_of(pipeline_id) if s.lease.epoch not in self._taking]
        left = len(leases)

        def one_done(lease: Lease, survivors: Sequence[Process], there: Sequence[Occupant]) -> None:
            nonlocal left
            self._seen_after_death(lease, why, ReleaseReason.UNREGISTERED, survivors, there)
            left -= 1
            if not left:
                done()

        self._taking.update(lease.epoch for lease in leases)
        for lease in leases:
            unnamed = () if self.named_holders(lease) else self.holders(lease)  # the others are dead by now
            self._kill_holders(lease, [p for p in unnamed if p != spare], told, partial(one_done, lease))
        if not leases:
            self._forget_if_empty(pipeline_id)
            done()

    def recover(self) -> None:
        """After a restart: goes on with whatever was ending."""
        core = self._core
        for status in list(core.state.leases.values()):
            if status.state is LeaseState.QUARANTINED:
                core.clock.call_later(core.settings.settle_s, partial(self._try_again, status.lease))
            elif status.state is LeaseState.DRAINING and (status.lease.phase is not Phase.ROLLOUT or status.reason):
                core.clock.call_later(core.settings.settle_s, partial(self.take, status.lease, status.reason))
        for pipeline_id, why in list(core.state.ending.items()):
            job = core.jobs.get(pipeline_id)
            if job is not None:
                job.ending = True
                core.clock.call_later(core.settings.settle_s, partial(self.end, pipeline_id, why))

    # -- below -------------------------------------------------------------------------------------------------------

    def _look(self, leases: Iterable[Lease], done: Callable[[dict[int, tuple[Occupant, ...]]], None]) -> None:
        """Whom of each lease's own, by its epoch, the locks of its devices name."""
        core, leases = self._core, tuple(leases)

        def seen(occupants: tuple[Occupant, ...]) -> None:
            ours = [occupant for occupant in occupants if occupant.pool == core.pool]
            done({lease.epoch: tuple(o for o in ours if _is_on(o, lease)) for lease in leases})

        core.nodes.occupied([device for lease in leases for device in self._devices(lease)], seen)

    def _devices(self, lease: Lease) -> list[Device]:
        """Those that have not left the pool."""
        return [device for d in lease.devices if (device := self._core.state.device(d)) is not None]

    def _release(self, leases: Mapping[Lease, ReleaseReason]) -> None:
        """In one change, which makes those active that wait for any of the devices."""
        if not leases:
            return
        core = self._core
        core.record(*(LeaseReleased(lease.epoch, reason) for lease, reason in leases.items()))
        for lease, reason in leases.items():
            if lease.phase is Phase.ROLLOUT:
                by_its_word = reason in (ReleaseReason.RELEASED, ReleaseReason.SHRUNK)
                core.rollouts.ended(lease, wake=not by_its_word)  # else it would be told what it has said
        for pipeline_id in {lease.pipeline_id: None for lease in leases}:
            self._forget_if_empty(pipeline_id)

    def _forget_if_empty(self, pipeline_id: str) -> None:
        state = self._core.state
        if pipeline_id in state.ending and not state.leases_of(pipeline_id):
            self._core.record(PipelineUnregistered(pipeline_id, state.ending[pipeline_id]))


def _is_on(occupant: Occupant, lease: Lease) -> bool:
    return occupant.device_id in lease.devices and occupant.epoch <= lease.epoch


def _describe(there: Sequence[Occupant]) -> str:
    return "; ".join(
        f"device {o.device_id} is still locked by {_describe_processes(o.processes) or 'a process that is not seen'}"
        for o in there
    )


def _describe_processes(processes: Sequence[Process]) -> str:
    return ", ".join(f"process {p.pid}{f' ({p.name})' if p.name else ''}" for p in processes)


def _first(reason: str) -> str:
    """The reason for which a lease was taken, without what a look found."""
    return reason.partition("; and ")[0]
