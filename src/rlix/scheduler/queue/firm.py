"""What jobs that cannot be preempted may have."""

import math
from dataclasses import replace

from rlix.scheduler.queue.jobs import Job, Snapshot
from rlix.scheduler.queue.timeline import Timeline

SAVED = 10
"""Of each team's waiting jobs so many are kept from being passed again and again by smaller ones of their team."""


class Firm:
    """Each team's jobs that cannot be preempted have its guarantee; what they have beyond it is lent to them, and all
    teams together are lent no more than is guaranteed to nobody: nobody could take it back.

    Waiting jobs hold a part of it from when on they are to have it. `fixed`: what those of each team have now.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._now = snapshot.now
        names = {*snapshot.teams, *(job.team for job in snapshot.jobs)}
        self._guaranteed = {name: snapshot.team(name).guaranteed for name in names}
        self.common = snapshot.common
        self.fixed = dict.fromkeys(names, 0)
        self._left = {name: Timeline(snapshot.now, places) for name, places in self._guaranteed.items()}  # < 0: lent
        self._common = Timeline(snapshot.now, snapshot.common)
        self._held: dict[int, tuple[Job, float, float]] = {}  # by waiting jobs; of a team in their order
        self._rooms: dict[str, Timeline] = {}

    def in_turn(self, job: Job, length: float) -> bool:
        """Whether it can have its part of the guarantee now, for so long, without keeping one ahead of it waiting."""
        return self._left[job.team].shortage(self._now, self._now + length, job.gpus) is None

    def save(self, job: Job, length: float) -> None:
        """Holds its part of its team's guarantee from when on others have ended that it waits for."""
        left, part = self._left[job.team], min(job.gpus, self._guaranteed[job.team])
        room = left if part == job.gpus else left.with_more(self._common)
        start, before = self._now, -math.inf
        while start != before:
            before, start = start, room.earliest(left.earliest(start, length, part), length, job.gpus)
        if start < math.inf:
            self._hold(replace(job, gpus=part), start, start + length)

    def take(self, job: Job, start: float, end: float) -> None:
        """It has this now, or will at a later time; one that holds all of it from an earlier time keeps that."""
        held = self._held.get(job.id)
        if start > self._now and held is not None and held[0].gpus == job.gpus and held[1] <= start:
            return
        if held is not None:
            self._change(held, -1)
        if start > self._now:
            self._hold(job, start, end)  # in its place among its team's
        else:
            self._held.pop(job.id, None)
            self._change((job, start, end), 1)
            self.fixed[job.team] += job.gpus

    def room(self, job: Job) -> Timeline:
        """What there is for it; others of its team that come behind it hold nothing against it."""
        if job.id not in self._held:
            if job.team not in self._rooms:
                self._rooms[job.team] = self._left[job.team].with_more(self._common)
            return self._rooms[job.team]
        theirs = [held for held in self._held.values() if held[0].team == job.team]
        own = theirs.index(self._held[job.id])
        for held in theirs[own:]:
            self._change(held, -1)
        room = self._left[job.team].with_more(self._common)
        for held in theirs[own:]:
            self._change(held, 1)
        return room

    def free_now(self, team: str) -> int:
        """For one more job of the team, whatever waiting ones hold."""
        return max(0, self._guaranteed[team] - self.fixed[team]) + self.common - self.lent_now()

    def lent_now(self) -> int:
        return sum(max(0, gpus - self._guaranteed[name]) for name, gpus in self.fixed.items())

    def holders(self, job: Job, at: float) -> tuple[Job, ...]:
        """The waiting jobs that hold something of what the job could have then."""
        return tuple(
            other
            for other, start, end in self._held.values()
            if start <= at < end
            and other.id != job.id
            and (other.team == job.team or self._left[other.team].free(at) < 0)
        )

    def _hold(self, job: Job, start: float, end: float) -> None:
        self._held[job.id] = (job, start, end)
        self._change(self._held[job.id], 1)

    def _change(self, held: tuple[Job, float, float], sign: int) -> None:
        job, start, end = held
        left, places = self._left[job.team], sign * job.gpus
        for begin, until, free in left.parts(start, end):
            if lent := max(0, places - free) - max(0, -free):
                self._common.take(begin, until, lent)
        left.take(start, end, places)
        self._rooms.clear()
