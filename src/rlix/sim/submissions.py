"""People who submit jobs for weeks, through the queue's own decisions (`rlix.scheduler.queue`), on a virtual clock.

A job here is so many GPUs for so long: what it would take once it has them. What sharing devices phase by phase does
inside that time is what the other workloads are about.
"""

import heapq
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Origin, Problem, inconsistent, problems_of
from rlix.scheduler.queue.decide import Decision, decide
from rlix.scheduler.queue.fair_share import Usage
from rlix.scheduler.queue.jobs import PRIORITIES, Job, Outcome, Pool, Snapshot, State, Stop, Team

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TeamSpec(_Model):
    """As in the queue's own rules."""

    guaranteed: Annotated[int, Field(ge=0)] = 0
    maximum: Count | None = None
    weight: Positive = 1.0


class UserSpec(_Model):
    """Jobs come at random (Poisson), of sizes that are as likely as each other and lognormal lengths."""

    name: str
    team: str
    jobs_per_day: Positive
    gpus: tuple[Count, ...] = Field(min_length=1)
    hours: Positive  # the median
    hours_sigma: Annotated[float, Field(ge=0)] = 0.8
    limit: Annotated[float, Field(ge=1)] | None = 2.0  # a job's time limit is so many times its length; none: none
    preemptible: bool = True
    priority: str = "normal"
    from_hour: Annotated[float, Field(ge=0, lt=24)] = 0.0  # submits between these hours of the day
    to_hour: Annotated[float, Field(gt=0, le=24)] = 24.0


class Submissions(_Model):
    name: str
    description: str = ""
    gpus: Count
    days: Positive = 30.0
    half_life_h: Positive = 168.0
    checkpoint_s: Annotated[float, Field(ge=0, le=120)] = 60.0  # until a job that was asked to stop has ended
    restart_s: Annotated[float, Field(ge=0)] = 300.0  # GPUs' time that a job loses that was stopped
    teams: dict[str, TeamSpec] = Field(default_factory=dict)
    users: tuple[UserSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> "Submissions":
        if problems := list(self._problems()):
            raise inconsistent(problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        for number, user in enumerate(self.users):
            most = min(self.gpus, self.teams.get(user.team, TeamSpec()).maximum or self.gpus)
            if max(user.gpus) > most:
                yield Problem(f"users.{number}.gpus", f"{max(user.gpus)} is more than the {most} that it may have")
            if user.priority not in PRIORITIES:
                yield Problem(f"users.{number}.priority", f"{user.priority!r}: must be one of {', '.join(PRIORITIES)}")
            if user.from_hour >= user.to_hour:
                yield Problem(f"users.{number}.to_hour", "must be after from_hour")
        if (guaranteed := sum(team.guaranteed for team in self.teams.values())) > self.gpus:
            yield Problem("teams", f"{guaranteed} GPUs are guaranteed, and the pool has {self.gpus}")


def read_submissions(data: Mapping[str, Any], origin: Origin) -> Submissions:
    """Raises SpecError with one line for each mistake."""
    try:
        return Submissions.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise origin.error(problems_of(error.errors(), Submissions, data)) from None


Decide = Callable[[Snapshot], Decision]


def first_come(snapshot: Snapshot) -> Decision:
    """In the order of arrival; who does not fit lets nobody pass."""
    free = snapshot.pool.places - sum(job.gpus for job in snapshot.jobs if job.active)
    admitted = []
    for job in sorted((job for job in snapshot.jobs if not job.active), key=lambda job: job.id):
        if job.gpus > free:
            break
        free -= job.gpus
        admitted.append(job.id)
    return Decision(tuple(admitted), (), {})


def backfill(snapshot: Snapshot) -> Decision:
    """In the order of arrival with backfill, whoever it is: the queue without teams, priorities and shares."""
    jobs = tuple(replace(job, team="all", owner="all", priority=0) for job in snapshot.jobs)
    return decide(replace(snapshot, jobs=jobs, teams={}, used={}))


def split(snapshot: Snapshot) -> Decision:
    """Each team on a part of its own: its guarantee, and by weight of what is guaranteed to nobody; at least as large
    as its largest job that is there."""
    names = sorted({*snapshot.teams, *(job.team for job in snapshot.jobs)})
    weights = sum(snapshot.team(name).weight for name in names)
    admitted: list[int] = []
    for name in names:
        team = snapshot.team(name)
        part = max(team.guaranteed + int(snapshot.common * team.weight / weights), 1)
        mine = tuple(job for job in snapshot.jobs if job.team == name)
        largest = max(job.gpus for job in mine) if mine else 0
        admitted += backfill(replace(snapshot, pool=Pool(max(part, largest)), jobs=mine)).admit
    return Decision(tuple(admitted), (), {})


QUEUES: Mapping[str, Decide] = {"rlix": decide, "backfill": backfill, "first-come": first_come, "split": split}


@dataclass(frozen=True, slots=True)
class TeamRow:
    """Waits are hours from submission to the first start; `share`: what it was given of all that was given."""

    team: str
    jobs: int
    gpu_h: float
    share: float
    wait_mean_h: float
    wait_p95_h: float
    wait_max_h: float


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One policy. `used_share`: of the GPUs' time while anybody submitted, what jobs had."""

    workload: str
    policy: str
    seed: int
    gpus: int
    jobs: int
    used_share: float
    wait_mean_h: float
    wait_p95_h: float
    wait_max_h: float
    slowdown_mean: float
    preemptions: int
    lost_gpu_h: float
    decisions: int
    teams: tuple[TeamRow, ...] = field(default=())


@dataclass(slots=True)
class _Run:
    """A job, and what is left of its work."""

    job: Job
    work_s: float
    left_s: float
    started: float | None = None
    ended: float | None = None
    gpu_s: float = 0.0


def draw(workload: Submissions, seed: int) -> list[tuple[Job, float]]:
    """Who submits what, in order, with the seconds that each job takes: the same for every policy."""
    found: list[tuple[float, UserSpec, int, float]] = []
    for number, user in enumerate(workload.users):
        random = np.random.default_rng([seed, number])
        open_share = (user.to_hour - user.from_hour) / 24.0
        at = 0.0
        while True:
            at += random.exponential(open_share * _DAY_S / user.jobs_per_day)  # of hours in which the user submits
            day, within = divmod(at, open_share * _DAY_S)
            time = day * _DAY_S + user.from_hour * _HOUR_S + within
            if time >= workload.days * _DAY_S:
                break
            work_s = float(user.hours * _HOUR_S * random.lognormal(0.0, user.hours_sigma))
            found.append((time, user, int(random.choice(user.gpus)), work_s))
    jobs = []
    for id, (time, user, gpus, work_s) in enumerate(sorted(found, key=lambda each: each[0]), 1):
        limit = math.inf if user.limit is None else user.limit * work_s + workload.restart_s
        job = Job(id, f"{user.name}-{id}", user.name, user.team, gpus, time, since=time)
        jobs.append(
            (
                replace(job, priority=PRIORITIES[user.priority], preemptible=user.preemptible, limit_s=limit),
                work_s,
            )
        )
    return jobs


class QueueSimulation:
    """One policy over all submissions, to the end of the last job."""

    def __init__(self, workload: Submissions, policy: Decide, seed: int) -> None:
        self._workload, self._policy = workload, policy
        self.runs = {job.id: _Run(job, work_s, work_s) for job, work_s in draw(workload, seed)}
        self._teams = {name: Team(t.guaranteed, t.maximum, t.weight) for name, t in workload.teams.items()}
        self._usage = Usage(workload.half_life_h * _HOUR_S)
        self._now = 0.0
        self._there: dict[int, _Run] = {}
        self._events: list[tuple[float, int, int]] = []  # when, job, which attempt ends (-1: it arrives)
        self.preemptions = self.decisions = 0
        self.lost_s = 0.0

    def run(self) -> None:
        for id, run in self.runs.items():
            heapq.heappush(self._events, (run.job.submitted_at, id, -1))
        while self._events:
            self._to(self._events[0][0])
            while self._events and self._events[0][0] <= self._now:
                _, id, attempt = heapq.heappop(self._events)
                self._happens(self.runs[id], attempt)
            self._decide()

    def _to(self, time: float) -> None:
        """What runs is charged for the time until then."""
        for run in self._there.values():
            if run.job.active:
                given = run.job.gpus * (time - self._now)
                run.gpu_s += given
                self._usage.charge(run.job.team, run.job.owner, given, time)
        self._now = time

    def _happens(self, run: _Run, attempt: int) -> None:
        job, now = run.job, self._now
        if attempt < 0:
            self._there[job.id] = run
        elif job.active and attempt == job.requeues:
            run.left_s -= now - job.admitted_at
            if job.stop is not None and run.left_s > 0:
                run.left_s += self._workload.restart_s
                self.lost_s += job.gpus * self._workload.restart_s
                run.job = replace(job.become(State.SUBMITTED, now), requeues=job.requeues + 1)
            elif job.stop is None or run.left_s <= 0:
                run.job, run.ended = replace(job.become(State.ENDED, now), outcome=Outcome.FINISHED), now
                del self._there[job.id]

    def _decide(self) -> None:
        now, jobs = self._now, tuple(run.job for run in self._there.values())
        found = self._policy(Snapshot(now, Pool(self._workload.gpus), jobs, self._teams, self._usage.at(now)))
        self.decisions += 1
        for one in found.preempt:
            victim = self._there[one.victim]
            victim.job = replace(victim.job, stop=Stop(now, "", for_id=one.for_id))
            self.preemptions += 1
            heapq.heappush(self._events, (now + self._workload.checkpoint_s, one.victim, victim.job.requeues))
        for id in found.admit:
            run = self._there[id]
            run.started = now if run.started is None else run.started
            run.job = replace(run.job.become(State.ADMITTED, now).become(State.RUNNING, now), admitted_at=now)
            heapq.heappush(self._events, (now + run.left_s, id, run.job.requeues))


def simulate_queue(workload: Submissions, policy: str, seed: int = 0) -> QueueRow:
    """Raises SpecError for a name that is no policy of queues."""
    if policy not in QUEUES:
        raise SpecError(f"--policy {policy}: unknown for people who submit; choose from {', '.join(QUEUES)}")
    simulation = QueueSimulation(workload, QUEUES[policy], seed)
    simulation.run()
    runs = list(simulation.runs.values())
    horizon = workload.days * _DAY_S
    given = sum(run.gpu_s for run in runs)
    teams = sorted({run.job.team for run in runs})
    return QueueRow(
        workload=workload.name,
        policy=policy,
        seed=seed,
        gpus=workload.gpus,
        jobs=len(runs),
        used_share=given / (workload.gpus * max([horizon, *(run.ended or 0.0 for run in runs)])),
        **_waits(runs),
        slowdown_mean=float(np.mean([((run.ended or 0.0) - run.job.submitted_at) / run.work_s for run in runs])),
        preemptions=simulation.preemptions,
        lost_gpu_h=simulation.lost_s / _HOUR_S,
        decisions=simulation.decisions,
        teams=tuple(_team(name, [run for run in runs if run.job.team == name], given) for name in teams),
    )


def _team(name: str, runs: Sequence[_Run], given: float) -> TeamRow:
    mine = sum(run.gpu_s for run in runs)
    return TeamRow(name, len(runs), mine / _HOUR_S, mine / given if given else 0.0, **_waits(runs))


def _waits(runs: Sequence[_Run]) -> dict[str, float]:
    hours = [((run.started or 0.0) - run.job.submitted_at) / _HOUR_S for run in runs] or [0.0]
    return {
        "wait_mean_h": float(np.mean(hours)),
        "wait_p95_h": float(np.percentile(hours, 95)),
        "wait_max_h": float(max(hours)),
    }
