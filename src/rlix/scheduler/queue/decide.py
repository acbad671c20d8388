"""Who is admitted now, who is stopped for whom, and why everybody else waits: one pure function.

Between teams comes first what is within a guarantee, then the team with the least decayed usage for its weight; within
a team the higher priority class, then the owner with the least usage, then who came first. In that order each job gets
the earliest time at which all that it needs is free for as long as it may run, so that whoever starts earlier than
somebody ahead of it delays nobody (conservative backfill: Mu'alem and Feitelson, "Utilization, predictability,
workloads, and user runtime estimates in scheduling the IBM SP2 with backfilling", 2001).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlix.scheduler.queue.fair_share import of_team, times_its_share
from rlix.scheduler.queue.firm import SAVED, Firm
from rlix.scheduler.queue.jobs import Job, Snapshot, State, Stop
from rlix.scheduler.queue.reasons import (
    AtMaximum,
    Drained,
    Held,
    Holder,
    Later,
    NoRoom,
    NotLent,
    Reason,
    Reclaiming,
    Reserved,
    TooLarge,
    Wait,
)
from rlix.scheduler.queue.timeline import Timeline

DEPTH = 100
"""So many waiting jobs have reservations; those behind start only where they delay none (Slurm: bf_max_job_test)."""
UNLIMITED_S = 365 * 86400.0
"""How long a job without a time limit is taken to run."""
STOP_S = 120.0
"""For a job that is asked to stop to write a checkpoint and end."""
PASSED_S = 3600.0
"""So long may smaller ones of its team pass a job that fits into its team's guarantee; then it takes their place."""
_FORESEEN_S = UNLIMITED_S / 2  # a start that is further away is not known


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running job is stopped, and queued again, for a waiting one."""

    victim: int
    for_id: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Ids, in order; of each job that waits on, why."""

    admit: tuple[int, ...]
    preempt: tuple[Preemption, ...]
    waits: Mapping[int, Wait]


def decide(snapshot: Snapshot) -> Decision:
    """What is to be done now. Asked again before anything has changed, it is the same."""
    waits: dict[int, Wait] = {}
    waiting: list[Job] = []
    for job in snapshot.jobs:
        if not job.active:
            reason = _unplaced(snapshot, job)
            if reason is None:
                waiting.append(job)
            else:
                waits[job.id] = Wait(reason, 0)
    board = _Board(snapshot)
    for turn in _in_order(snapshot, waiting, board):
        board.place(turn)
    return Decision(tuple(board.admitted), tuple(board.preempted), waits | board.settled())


def _unplaced(snapshot: Snapshot, job: Job) -> Reason | None:
    """Why a job takes no part; None: it does."""
    team = snapshot.team(job.team)
    if job.state is State.HELD:
        return Held(job.why)
    if snapshot.drained:
        return Drained(snapshot.drained)
    if job.gpus > snapshot.pool.places:
        return TooLarge(job.gpus, snapshot.pool.places, "")
    if team.maximum is not None and job.gpus > team.maximum:
        return TooLarge(job.gpus, team.maximum, f"team {job.team}")
    if job.not_before > snapshot.now:
        return Later(job.failures, job.not_before, job.why)
    return None


def within(jobs: Sequence[Job], guaranteed: int) -> frozenset[int]:
    """Which of a team's jobs that can be preempted are within its guarantee: those that fit, in the order given, into
    what the others leave. The rest borrow."""
    left, found = guaranteed - sum(job.gpus for job in jobs if not job.preemptible), set()
    for job in jobs:
        if job.preemptible and job.gpus <= left:
            left -= job.gpus
            found.add(job.id)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A waiting job. `entitled`: with all that its team has, it is within the guarantee, once `over` places are left by
    `passers`; and it keeps no larger one out of it that is ahead."""

    job: Job
    entitled: bool
    over: int = 0
    passers: frozenset[int] = frozenset()


def _in_order(snapshot: Snapshot, waiting: Sequence[Job], board: "_Board") -> list[_Turn]:
    keyed: list[tuple[tuple[bool, bool, float, str, int], _Turn]] = []
    for name in {job.team for job in waiting}:
        mine = [job for job in waiting if job.team == name]
        mine.sort(key=lambda job: _rank(snapshot, job))
        left = snapshot.team(name).guaranteed - sum(job.gpus for job in board.active if job.team == name)
        used = of_team(snapshot, name)
        for place, job in enumerate(mine):
            over = job.gpus - left
            passers = _passers(snapshot, job, board.active) if over > 0 else []
            entitled = over <= sum(other.gpus for other in passers) and (
                job.preemptible or board.firm.in_turn(job, _length(job))
            )
            left -= job.gpus if entitled else 0
            if place < SAVED and (not job.preemptible or _is_late(snapshot, job)):
                board.firm.save(job, _length(job))
            over -= sum(other.gpus for other in passers if other.stop is not None)
            turn = _Turn(job, entitled, over, frozenset(other.id for other in passers if entitled))
            borrows = over > 0  # until its passers have left: first come those that are within their guarantee now
            keyed.append(((not entitled, entitled and borrows, used, name, place), turn))
    return [turn for _, turn in sorted(keyed, key=lambda item: item[0])]


def _rank(snapshot: Snapshot, job: Job) -> tuple[int, float, int]:
    """Who is next in a team."""
    return -job.priority, snapshot.used.get((job.team, job.owner), 0.0), job.id


def _is_late(snapshot: Snapshot, job: Job) -> bool:
    return snapshot.now - max(job.submitted_at, job.since) >= PASSED_S


def _passers(snapshot: Snapshot, job: Job, active: Sequence[Job]) -> list[Job]:
    """Of whom a job that can be preempted, and has waited long, takes the place: smaller such ones of its team that
    are behind it and began while it waited."""
    if not job.preemptible or not _is_late(snapshot, job):
        return []
    since, rank = max(job.submitted_at, job.since), _rank(snapshot, job)
    return [
        other
        for other in active
        if other.team == job.team
        and other.preemptible
        and other.gpus < job.gpus
        and other.admitted_at > since
        and _rank(snapshot, other) > rank
    ]


def end_of(job: Job, now: float) -> float:
    """When an active job has ended, at the latest; one that should have, any moment."""
    end = job.admitted_at + min(job.limit_s, UNLIMITED_S) + STOP_S
    if job.stop is not None:
        end = min(end, job.stop.at + STOP_S)
    return max(end, now + 1.0)


def _length(job: Job) -> float:
    """How long it may have its GPUs."""
    return min(job.limit_s, UNLIMITED_S) + STOP_S


class _Board:
    """What is free when, while jobs are placed one after another: in the pool, under each team's maximum, and for jobs
    that cannot be preempted."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, now = snapshot, snapshot.now
        self.active = sorted((job for job in snapshot.jobs if job.active), key=lambda job: (job.admitted_at, job.id))
        self.admitted: list[int] = []
        self.preempted: list[Preemption] = []
        self.firm = Firm(snapshot)
        self._waiting: list[tuple[Job, float, Reason | None]] = []  # why; None: too little is free
        self._pool = Timeline(now, snapshot.pool.places)
        self._teams = {name: Timeline(now, t.maximum) for name, t in snapshot.teams.items() if t.maximum is not None}
        self._reserved: list[tuple[Job, float, float]] = []
        self._shares = {name: times_its_share(snapshot, name) for name in {job.team for job in snapshot.jobs}}
        for job in self.active:
            self._take(job, now, end_of(job, now))

    def place(self, turn: _Turn) -> None:
        """Admits the job, or has others stopped for it, or reserves what it needs for the time when it is free."""
        job, now, length = turn.job, self.snapshot.now, _length(turn.job)
        lines = self._lines(job)
        reserves = len(self._reserved) < DEPTH
        start = _earliest(lines, now, length, job.gpus) if reserves else self._now_or_never(lines, job, length)
        if start > now + STOP_S and (victims := self._victims(turn, lines, length)):
            start = _earliest(lines, now, length, job.gpus)  # now, where there is too little only later on
            self.preempted += [Preemption(victim.id, job.id) for victim in victims]
        if start <= now:
            self.admitted.append(job.id)
            self.active.append(replace(job, state=State.ADMITTED, admitted_at=now))
            self._take(job, now, now + length)
            return
        going = [other for other in self.active if other.stop is not None and other.stop.for_id == job.id]
        if going:
            self._waiting.append((job, start, Reclaiming(job.gpus, self._holders(going))))
        elif self._lacks(job, ()):
            self._waiting.append((job, start, None))
        else:
            self._waiting.append((job, start, self._would_delay(job, lines, length)))
        if reserves and start < math.inf:
            self._take(job, start, start + length)
            self._reserved.append((job, start, start + length))

    def _lines(self, job: Job) -> list[Timeline]:
        """What limits the job; for one that cannot be preempted as things are now."""
        lines = [self._teams[job.team]] if job.team in self._teams else []
        return [*lines, *([] if job.preemptible else [self.firm.room(job)]), self._pool]

    def _take(self, job: Job, start: float, end: float) -> None:
        self._hold(job, start, end, job.gpus)
        if not job.preemptible:
            self.firm.take(job, start, end)

    def _hold(self, job: Job, start: float, end: float, places: int) -> None:
        for line in [self._teams[job.team]] if job.team in self._teams else []:
            line.take(start, end, places)
        self._pool.take(start, end, places)

    def _within(self, team: str) -> frozenset[int]:
        mine = [job for job in self.active if job.team == team]
        return within(mine, self.snapshot.team(team).guaranteed)

    def _now_or_never(self, lines: Sequence[Timeline], job: Job, length: float) -> float:
        now = self.snapshot.now
        fits = all(line.shortage(now, now + length, job.gpus) is None for line in lines)
        return now if fits else math.inf

    def _victims(self, turn: _Turn, lines: Sequence[Timeline], length: float) -> list[Job]:
        """The fewest jobs with which out of the way it could begin; none where even all would not do.

        A job within its team's guarantee takes back what is lent. Any job may take the place of one of its own team
        that has a lower priority, or has passed it for long. In either case only of jobs that can be preempted: first
        of those that passed it, then of the team that has used most for its weight, then of the lowest priority, then
        of those that began last.
        """
        job, soon = turn.job, self.snapshot.now + STOP_S
        chosen: list[Job] = []

        def enough() -> bool:
            within = not turn.passers or turn.over <= sum(victim.gpus for victim in chosen if victim.team == job.team)
            return within and _earliest(lines, soon, length, job.gpus) <= soon

        for victim in self._candidates(turn):
            self._give_back(victim, soon, -victim.gpus)
            chosen.append(victim)
            if enough():
                break
        else:
            for victim in chosen:
                self._give_back(victim, soon, victim.gpus)
            return []
        for victim in list(chosen):  # some that were chosen before the last may not be needed
            self._give_back(victim, soon, victim.gpus)
            chosen.remove(victim)
            if not enough():
                self._give_back(victim, soon, -victim.gpus)
                chosen.append(victim)
        stop = Stop(self.snapshot.now, "", for_id=job.id)
        gone = {victim.id for victim in chosen}
        self.active = [replace(other, stop=stop) if other.id in gone else other for other in self.active]
        return chosen

    def _candidates(self, turn: _Turn) -> list[Job]:
        job = turn.job
        kept: set[int] = set()
        for name in {other.team for other in self.active}:
            kept |= self._within(name)
        found = [
            other
            for other in self.active
            if other.preemptible
            and other.state is State.RUNNING
            and other.stop is None
            and (
                (other.priority < job.priority or other.id in turn.passers)
                if other.team == job.team
                else (turn.entitled and other.id not in kept)
            )
        ]
        used = {other.team: of_team(self.snapshot, other.team) for other in found}
        return sorted(
            found,
            key=lambda o: (o.id not in turn.passers, -used[o.team], o.priority, -o.admitted_at, -o.id),
        )

    def _give_back(self, victim: Job, soon: float, places: int) -> None:
        self._hold(victim, soon, max(soon, end_of(victim, self.snapshot.now)), places)

    def settled(self) -> dict[int, Wait]:
        """When all are placed: why each waits that was not admitted, as things are then."""
        foreseen, holders = self.snapshot.now + _FORESEEN_S, self._holders(self.active)
        waits: dict[int, Wait] = {}
        for job, start, why in self._waiting:
            reason = why or self._lacks(job, holders)
            assert reason is not None  # nothing became free by placing others
            share = self._shares[job.team]
            waits[job.id] = Wait(reason, len(waits), start if start < foreseen else None, share)
        return waits

    def _lacks(self, job: Job, holders: tuple[Holder, ...]) -> Reason | None:
        """Of what too little is free now; None: of nothing."""
        now, team, firm = self.snapshot.now, self.snapshot.team(job.team), self.firm
        if team.maximum is not None and (free := self._teams[job.team].free(now)) < job.gpus:
            return AtMaximum(job.gpus, job.team, team.maximum - free, team.maximum)
        if not job.preemptible and firm.free_now(job.team) < job.gpus:
            fixed = min(firm.fixed[job.team], team.guaranteed)
            return NotLent(job.gpus, team.guaranteed, fixed, firm.common, firm.lent_now())
        if (free := self._pool.free(now)) < job.gpus:
            return NoRoom(job.gpus, max(0, free), holders)
        return None

    def _would_delay(self, job: Job, lines: Sequence[Timeline], length: float) -> Reason:
        now = self.snapshot.now
        found = [(at, line) for line in lines if (at := line.shortage(now, now + length, job.gpus)) is not None]
        at, line = min(found, key=lambda item: item[0])
        if line is self._pool or line is self._teams.get(job.team):
            theirs = (o for o, start, end in self._reserved if start <= at < end)
            others = [o for o in theirs if line is self._pool or o.team == job.team]
            of = "" if line is self._pool else f" to team {job.team}"
        else:
            others, of = list(self.firm.holders(job, at)), f" to jobs of team {job.team} that cannot be preempted"
        ends = now + length if job.limit_s < math.inf else None
        return Reserved(job.gpus, at, max(0, line.free(at)), tuple(o.said for o in others), ends, of)

    def _holders(self, jobs: Sequence[Job]) -> tuple[Holder, ...]:
        """The first to end first."""
        now = self.snapshot.now
        ends = sorted((end_of(job, now), job.id, job) for job in jobs)
        return tuple(
            Holder(job.said, job.gpus, end if job.limit_s < math.inf or job.stop else None) for end, _, job in ends
        )


def _earliest(lines: Sequence[Timeline], start: float, length: float, places: int) -> float:
    """When on all of them so many are free for so long."""
    at = start
    while True:
        latest = max(line.earliest(at, length, places) for line in lines)
        if latest in (at, math.inf):
            return latest
        at = latest
