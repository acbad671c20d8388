"""What is to be done about a lease now: a pure function of what is recorded, said and seen of it, and of the time.

Nobody's word is enough for a device. A lease that is on its way out passes its devices on when they were looked at and
are free. Who keeps them locked is ended once the lease's time is over, and what is locked even then is quarantined and
looked at again. What has not been seen yet is not known, and leads to nothing but a look.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rlix.control.settings import Settings
from rlix.protocol.messages import UNSEEN, LeaseState, LeaseStatus, Occupant, Process, ReleaseReason
from rlix.protocol.types import Phase

LOOK_AGAIN_S = 0.02  # while somebody is about to let go
_LOOK_ON_S = 1.0  # while nobody says anything, or a node does not answer
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """A lease is to end: from when its devices are looked at, and from when whoever still locks them is ended.

    `given`: by its holder's word, so that it has not begun to drain before it was found locked. `told`: what those
    that are ended are told, None while nobody has been.
    """

    why: str
    reason: ReleaseReason
    look_from: float
    kill_from: float
    given: bool = False
    told: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a gang's devices, which its holder has given back at `since`; it keeps the others."""

    devices: tuple[int, ...]
    since: float
    kill_from: float


@dataclass(frozen=True, slots=True)
class Sight:
    """Who locks a lease's devices under it or an older one: asked for at `asked_at`, answered at `seen_at`."""

    asked_at: float
    seen_at: float
    there: tuple[Occupant, ...]

    def of(self, devices: Collection[int]) -> tuple[Occupant, ...]:
        return tuple(occupant for occupant in self.there if occupant.device_id in devices)


@dataclass(frozen=True, slots=True)
class Hold:
    """What was said and seen of a lease, beside what is recorded. Times are the clock's.

    `note_by`: until when a rollout has to note its bundle. `ends_by`: how long a gang's phase may take. `awaited_by`:
    until when a node is given to answer. `killed`: those that were seen have been ended. `pause_s`: until the next
    look, in quarantine.
    """

    note_by: float = math.inf
    ends_by: float = math.inf
    parts: tuple[Part, ...] = ()
    leaving: Leaving | None = None
    sight: Sight | None = None
    awaited_by: float = 0.0
    killed: bool = False
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing, until this time or the next change."""

    until: float = math.inf


@dataclass(frozen=True, slots=True)
class Look:
    """Ask the nodes who locks its devices."""


@dataclass(frozen=True, slots=True)
class Note:
    """Its rollout uses it, whether it says so or not."""


@dataclass(frozen=True, slots=True)
class AskBack:
    """Its rollout does not know of it, and nobody uses it: it is as if given back."""

    why: str


@dataclass(frozen=True, slots=True)
class Take:
    """End it without its holder's help."""

    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Record that it is on its way out."""

    why: str


@dataclass(frozen=True, slots=True)
class Free:
    """Some of its devices are free; none: they went before it was looked at them."""

    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """Have the nodes end those of these processes that have its devices' locks open."""

    processes: tuple[Process, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """Its devices are free."""

    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Nobody gets its devices; look again after a pause."""

    why: str
    pause_s: float


Action = Rest | Look | Note | AskBack | Take | Drain | Free | Kill | Release | Quarantine


def reconcile(status: LeaseStatus, hold: Hold, now: float, settings: Settings) -> Action:
    """The next action. Asked again before anything has changed, it is the same one."""
    if hold.leaving is not None:
        return _leaves(status, hold, hold.leaving, now, settings)
    if status.state is not LeaseState.ACTIVE:
        return Rest()
    if now < hold.awaited_by:
        return Rest(hold.awaited_by)
    if now >= hold.ends_by:
        lease = status.lease
        return Take(f"{lease.phase.name} took longer than the {lease.longest_s:g} s that it declared")
    if now >= hold.note_by:
        if not _seen(hold.sight, hold.note_by, now):
            return Look()
        if hold.sight is not None and any(o.epoch == status.lease.epoch for o in hold.sight.there):
            return Note()
        return AskBack("the job did not take it up: it has not asked for news of its rollout since")
    if hold.parts:
        return _gives_part(status, hold, hold.parts[0], now)
    return Rest(min(hold.ends_by, hold.note_by))


def _gives_part(status: LeaseStatus, hold: Hold, part: Part, now: float) -> Action:
    given = tuple(device for device in part.devices if device in status.lease.devices)  # or it was said twice
    if not given or len(given) == len(status.lease.devices):  # the last one goes with the lease
        return Free(())
    there = hold.sight.of(given) if hold.sight is not None else ()
    unseen = any(occupant.epoch == UNSEEN for occupant in there)
    again_s = _LOOK_ON_S if unseen else LOOK_AGAIN_S
    if hold.sight is None or not _seen(hold.sight, part.since, now, again_s):
        return Look()
    if not there:
        return Free(given)
    if unseen or now < part.kill_from:
        return Rest(hold.sight.seen_at + again_s)
    return Take(_against_its_word(there))


def _leaves(status: LeaseStatus, hold: Hold, leaving: Leaving, now: float, settings: Settings) -> Action:
    if status.state is LeaseState.PENDING:
        return Release(leaving.reason)
    if status.state is LeaseState.ACTIVE and not leaving.given:
        return Drain(leaving.why)
    if now < hold.awaited_by:
        return Rest(hold.awaited_by)
    if now < leaving.look_from:
        return Rest(leaving.look_from)
    again_s = LOOK_AGAIN_S if leaving.given else _LOOK_ON_S
    if hold.sight is None or not _seen(hold.sight, leaving.look_from, now, again_s):
        return Look()
    there = hold.sight.there
    if not there:
        return Release(leaving.reason)
    if status.state is LeaseState.ACTIVE:
        return Drain(_against_its_word(there))
    if now < leaving.kill_from:
        return Rest(min(leaving.kill_from, hold.sight.seen_at + again_s))
    why = _against_its_word(there) if leaving.given else leaving.why
    processes = tuple({process: None for occupant in there for process in occupant.processes})
    if processes and not hold.killed:
        return Kill(processes, why)
    in_vain = ", although it was killed" if hold.killed else ""
    pause_s = min(2 * hold.pause_s or settings.quarantine_retry_s, _LONGEST_PAUSE_S)
    return Quarantine(f"{why}; and {describe(there)}{in_vain}", pause_s)


def _seen(sight: Sight | None, since: float, now: float, again_s: float = LOOK_AGAIN_S) -> bool:
    """Whether what was seen was asked for late enough, and is what there is to know now."""
    return sight is not None and sight.asked_at >= since and now < sight.seen_at + again_s


def given_back(status: LeaseStatus, hold: Hold, now: float, settings: Settings) -> Hold:
    """Its holder says that its bytes are gone. Whoever takes it already goes on with that, and looks at once."""
    leaving = hold.leaving
    if status.state is LeaseState.QUARANTINED and leaving is not None:
        return looked_at(hold, now)
    if leaving is not None and (leaving.given or leaving.kill_from <= now):
        return hold
    shrunk = status.lease.phase is Phase.ROLLOUT and status.state is LeaseState.DRAINING
    reason = ReleaseReason.SHRUNK if shrunk else ReleaseReason.RELEASED
    return _with(hold, Leaving(status.reason, reason, now, now + settings.release_grace_s, given=True))


def asked_back(hold: Hold, now: float, limit_s: float) -> Hold:
    """Its rollout shall give it back, and has its time for that; one that it has not noted in time may be free."""
    why = f"the job did not give it back within {limit_s:g} s"
    reason = ReleaseReason.SHRUNK if hold.note_by < math.inf else ReleaseReason.KILLED
    return _with(hold, Leaving(why, reason, min(hold.note_by, now + limit_s), now + limit_s))


def unused(hold: Hold, why: str, now: float, settings: Settings) -> Hold:
    """Its rollout does not know of it: it is free at once, or else the rollout has its time to give it back."""
    return _with(hold, Leaving(why, ReleaseReason.SHRUNK, now, now + settings.shrink_deadline_s))


def taken(hold: Hold, why: str, reason: ReleaseReason, told: str, now: float) -> Hold:
    """It ends without its holder's help."""
    return _with(hold, Leaving(why, reason, now, now, told=told))


def looked_at(hold: Hold, now: float) -> Hold:
    """Look at once, whatever was seen before, and whoever is awaited; who is there has had its time."""
    assert hold.leaving is not None
    return Hold(leaving=replace(hold.leaving, look_from=now, kill_from=now), pause_s=hold.pause_s)


def _with(hold: Hold, leaving: Leaving) -> Hold:
    return Hold(note_by=hold.note_by, leaving=leaving, awaited_by=hold.awaited_by, pause_s=hold.pause_s)


def describe(there: Sequence[Occupant]) -> str:
    """Who is still on which devices, for people."""
    return "; ".join(f"device {occupant.device_id} {_describe(occupant)}" for occupant in there)


def _describe(occupant: Occupant) -> str:
    if occupant.epoch == UNSEEN:
        return "cannot be looked at, for its node does not answer"
    processes = ", ".join(f"process {p.pid}{f' ({p.name})' if p.name else ''}" for p in occupant.processes)
    return f"is still locked by {processes or 'a process that is not seen'}"


def _against_its_word(there: Sequence[Occupant]) -> str:
    return f"its holder says that its bytes are gone, but {describe(there)}"
