"""Why a job waits, as data, and the sentence that it makes. Every number in a sentence is a field of the reason."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Clock = Callable[[float], str]
"""A unix time, for people: "14:20"."""
_SHOWN = 3  # of several jobs in a sentence


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that has GPUs. `until`: when it must have ended, by its time limit; None: it has none."""

    said: str
    gpus: int
    until: float | None


@dataclass(frozen=True, slots=True)
class Held:
    """By a person, who must release it."""

    by: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing starts until a person says so."""

    by: str


@dataclass(frozen=True, slots=True)
class Later:
    """It came back `failures` times in a row for the pool's reasons, and is tried again at `until`."""

    failures: int
    until: float
    why: str


@dataclass(frozen=True, slots=True)
class TooLarge:
    """It needs more than there is (`whose` is empty), or than its team may have."""

    gpus: int
    most: int
    whose: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Fewer are free than it needs."""

    gpus: int
    free: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class AtMaximum:
    """Its team would have more than its maximum."""

    gpus: int
    team: str
    used: int
    maximum: int


@dataclass(frozen=True, slots=True)
class NotLent:
    """It cannot be preempted, and beyond its team's guarantee such jobs share what is guaranteed to nobody.

    `fixed`: what jobs of the team that cannot be preempted have of its guarantee; `taken`: all teams' beyond theirs.
    """

    gpus: int
    guaranteed: int
    fixed: int
    common: int
    taken: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """It fits now, but not for as long as it may run: at `at` at most `free` are left beside those reserved for others.

    `ends`: when it would have to be over, None without a time limit. `of`: of what too few are left, "" of the pool.
    """

    gpus: int
    at: float
    free: int
    others: tuple[str, ...]
    ends: float | None
    of: str = ""


@dataclass(frozen=True, slots=True)
class Reclaiming:
    """Jobs that can be preempted write a checkpoint and end for it."""

    gpus: int
    victims: tuple[Holder, ...]


Reason = Held | Drained | Later | TooLarge | NoRoom | AtMaximum | NotLent | Reserved | Reclaiming


@dataclass(frozen=True, slots=True)
class Wait:
    """A reason; how many jobs are ahead; when it starts at the latest if nobody comes before it, None where nobody
    knows; and how much of its share its team has used."""

    reason: Reason
    ahead: int
    start: float | None = None
    share: float | None = None


def sentence(wait: Wait, unit: str, clock: Clock) -> str:
    """One sentence. `unit`: what is counted, such as "GPUs"."""
    parts = [_why(wait.reason, unit, clock)]
    if wait.ahead:
        parts.append(f"{wait.ahead} job{' is' if wait.ahead == 1 else 's are'} ahead of it")
    if wait.start is not None:
        parts.append(f"it starts by {clock(wait.start)} if nobody comes before it")
    if wait.share is not None:
        parts.append(f"its team has used {wait.share:.1f} × its share lately")
    return "; ".join(parts)


def _why(reason: Reason, unit: str, clock: Clock) -> str:
    match reason:
        case Held(by):
            return f"is held by {by}"
        case Drained(by):
            return f"waits for the queue, which {by} has drained: nothing starts until `rlix queue resume`"
        case Later(failures, until, why):
            times = "once" if failures == 1 else f"{failures} times in a row"
            return f"came back {times} ({why}) and is tried again at {clock(until)}"
        case TooLarge(gpus, most, whose):
            return f"{_needs(gpus, unit)} at once, and {whose or 'the pool'} has {'at most ' if whose else ''}{most}"
        case NoRoom(gpus, free, holders):
            return f"{_needs(gpus, unit)} at once, {_are(free)} free; {_held(holders, clock)}"
        case AtMaximum(gpus, team, used, maximum):
            return f"{_needs(gpus, unit)}, and {team} has {used} of the {maximum} that it may have"
        case NotLent(gpus, guaranteed, fixed, common, taken):
            never = "; it will never start while shares are as they are" if gpus > guaranteed + common else ""
            return (
                f"{_needs(gpus, unit)} and cannot be preempted: of the {guaranteed} guaranteed to its team such "
                f"jobs have {fixed}, and of the {common} guaranteed to nobody {taken}{never}"
            )
        case Reserved(gpus, at, free, others, ends, of):
            names = _some(others)
            if ends is None:
                needs = f"{_needs(gpus, unit)} without a time limit"
                return f"{needs}, and {names} would wait for it: cancel it and submit it with --time"
            left = f"at most {_are(free)} left{of} from {clock(at)} on beside what is reserved for {names}"
            return f"{_needs(gpus, unit)} until {clock(ends)}, and {left}"
        case Reclaiming(gpus, victims):
            return f"{_needs(gpus, unit)}, for which {_some([v.said for v in victims])} writes a checkpoint and ends"


def counted(count: int, unit: str) -> str:
    """ "1 GPU", "2 GPUs", "1 place (2 on each GPU)"."""
    one = unit.replace("GPUs", "GPU", 1).replace("places", "place", 1)
    return f"{count} {one if count == 1 else unit}"


def _needs(gpus: int, unit: str) -> str:
    return f"needs {counted(gpus, unit)}"


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"


def _held(holders: Sequence[Holder], clock: Clock) -> str:
    shown = [
        f"{_are(h.gpus)} held by {h.said} {'without a time limit' if h.until is None else f'until {clock(h.until)}'}"
        for h in holders[:_SHOWN]
    ]
    if more := holders[_SHOWN:]:
        shown.append(f"{sum(h.gpus for h in more)} by {len(more)} more")
    return ", ".join(shown) or "nobody holds any"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
