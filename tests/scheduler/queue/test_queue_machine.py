"""Random pools, teams and jobs, lived through to the end: what must hold of every decision."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.scheduler.queue.decide import PASSED_S, STOP_S, UNLIMITED_S, Decision, decide, end_of, within
from rlix.scheduler.queue.jobs import Job, Pool, Snapshot, State, Stop, Team
from rlix.scheduler.queue.reasons import (
    AtMaximum,
    NoRoom,
    NotLent,
    Reason,
    Reclaiming,
    Reserved,
    TooLarge,
    sentence,
)

TEAMS = ("a", "b", "c")


@dataclass(frozen=True)
class Scene:
    places: int
    teams: dict[str, Team]
    jobs: tuple[tuple[Job, float], ...]  # each with the seconds that it would run
    used: dict[tuple[str, str], float]


@st.composite
def scenes(draw: st.DrawFn, *, fixed: bool = False, exact: bool = False) -> Scene:
    """`fixed`: no guarantees, nobody is stopped; `exact`: all are there at once, and each runs as long as it may."""
    places = draw(st.integers(1, 12))
    teams, left = {}, places
    for name in TEAMS[: draw(st.integers(0, 3))]:
        guaranteed = 0 if fixed else draw(st.integers(0, left))
        left -= guaranteed
        maximum = draw(st.none() | st.integers(max(1, guaranteed), places + 1))
        teams[name] = Team(guaranteed, maximum, draw(st.sampled_from((0.5, 1.0, 3.0))))
    jobs = []
    for id in range(1, draw(st.integers(1, 14)) + 1):
        limit = draw(st.sampled_from((math.inf, 50.0, 400.0, 3600.0)))
        seconds = min(limit, UNLIMITED_S) + STOP_S
        job = Job(
            id,
            f"j{id}",
            draw(st.sampled_from(("ann", "bob"))),
            draw(st.sampled_from(TEAMS)),
            draw(st.integers(1, places + (id % 7 == 0))),
            submitted_at=0.0 if exact else draw(st.integers(0, 4)) * 100.0,
            priority=draw(st.integers(-1, 1)),
            preemptible=not fixed and draw(st.booleans()),
            limit_s=limit,
        )
        jobs.append((job, seconds if exact else draw(st.floats(0.0, 1.0)) * seconds))
    used = {(draw(st.sampled_from(TEAMS)), "ann"): draw(st.sampled_from((0.0, 10.0, 1e6)))}
    return Scene(places, teams, tuple(jobs), used)


def live(scene: Scene) -> list[tuple[Snapshot, Decision]]:
    """Every decision until nothing happens any more. A stopped job takes a while, and is queued again."""
    pool, there = Pool(scene.places), {job.id: job for job, _ in scene.jobs}
    work, ends = {job.id: seconds for job, seconds in scene.jobs}, {}
    arrivals = sorted({job.submitted_at for job in there.values()})
    made: list[tuple[Snapshot, Decision]] = []
    now = 0.0
    while len(made) < 400:
        jobs = tuple(job for job in there.values() if job.submitted_at <= now and job.state is not State.ENDED)
        snapshot = Snapshot(now, pool, jobs, scene.teams, scene.used)
        decision = decide(snapshot)
        made.append((snapshot, decision))
        for id in decision.admit:
            there[id] = replace(there[id].become(State.ADMITTED, now).become(State.RUNNING, now), admitted_at=now)
            ends[id] = now + work[id]
        for one in decision.preempt:
            there[one.victim] = replace(there[one.victim], stop=Stop(now, "", for_id=one.for_id))
            ends[one.victim] = min(ends[one.victim], now + STOP_S)
        later = [at for at in (*ends.values(), *arrivals) if at > now or at in ends.values()]
        if not later:
            return made
        now = max(now, min(later))
        for id in [id for id, at in ends.items() if at <= now]:
            job, stopped = there[id], there[id].stop is not None
            work[id] = max(0.0, work[id] - (now - job.admitted_at)) if stopped else 0.0
            del ends[id]
            there[id] = job.become(State.SUBMITTED if stopped and work[id] else State.ENDED, now)
    return made


def after(snapshot: Snapshot, decision: Decision) -> list[Job]:
    """Those that have GPUs once the decision is carried out; nobody has ended yet."""
    stops = {one.victim: one.for_id for one in decision.preempt}
    active = [
        replace(job, stop=Stop(snapshot.now, "", for_id=stops[job.id])) if job.id in stops else job
        for job in snapshot.jobs
        if job.active
    ]
    by_id = {job.id: job for job in snapshot.jobs}
    return active + [replace(by_id[id], state=State.ADMITTED, admitted_at=snapshot.now) for id in decision.admit]


def gpus(jobs: Sequence[Job]) -> int:
    return sum(job.gpus for job in jobs)


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_no_share_is_exceeded(scene: Scene) -> None:
    for snapshot, decision in live(scene):
        active = after(snapshot, decision)
        assert gpus(active) <= scene.places
        lent = 0
        for name in TEAMS:
            mine, team = [job for job in active if job.team == name], snapshot.team(name)
            assert team.maximum is None or gpus(mine) <= team.maximum
            lent += max(0, gpus([job for job in mine if not job.preemptible]) - team.guaranteed)
        assert lent <= snapshot.common, "what is guaranteed can be taken back from whoever borrows it"


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_guaranteed_shares_are_reachable(scene: Scene) -> None:
    """Whose team would be within its guarantee with it starts as soon as those who borrow have stopped. One that cannot
    be preempted may have to keep the turn of a larger such one, which waits for others of their team."""
    for snapshot, decision in live(scene):
        active = after(snapshot, decision)
        for name, team in scene.teams.items():
            left = team.guaranteed - gpus([job for job in active if job.team == name])
            waiting = [job for job in snapshot.jobs if job.id in decision.waits and job.team == name]
            turn_kept = any(not job.preemptible and job.gpus > left for job in waiting)
            entitled = [job for job in waiting if job.gpus <= left and (job.preemptible or not turn_kept)]
            starts = [decision.waits[job.id].start for job in waiting]
            soon = snapshot.now + STOP_S
            assert not entitled or any(start is not None and start <= soon for start in starts), (name, decision)


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_who_is_stopped_can_be_and_not_for_nothing(scene: Scene) -> None:
    for snapshot, decision in live(scene):
        by_id, active = {job.id: job for job in snapshot.jobs}, after(snapshot, decision)
        going = [job for job in active if end_of(job, snapshot.now) <= snapshot.now + STOP_S]
        for one in decision.preempt:
            victim, winner = by_id[one.victim], by_id[one.for_id]
            assert victim.preemptible and victim.stop is None and victim.state is State.RUNNING
            mine = [job for job in active if job.team == victim.team]
            passers = [job for job in snapshot.jobs if passed(snapshot, winner, job)]
            if victim.team == winner.team:
                assert victim.priority < winner.priority or victim in passers
            else:
                team = snapshot.team(winner.team)
                have = [job for job in snapshot.jobs if job.active and job.team == winner.team]  # not who borrows next
                assert gpus([job for job in have if job not in passers]) + winner.gpus <= team.guaranteed
                assert victim.id not in within(mine, snapshot.team(victim.team).guaranteed)
            if winner.id in decision.admit:  # it begins beside them, and needs what they have only later
                continue
            assert winner.gpus <= scene.places - gpus(active) + gpus(going)
            assert decision.waits[winner.id].start == snapshot.now + STOP_S


def passed(snapshot: Snapshot, job: Job, other: Job) -> bool:
    """Whether the other one, which is smaller, began while a job waited for long."""
    waits_since = max(job.submitted_at, job.since)
    late = job.preemptible and snapshot.now >= waits_since + PASSED_S
    smaller = other.active and other.team == job.team and other.gpus < job.gpus and other.preemptible
    return late and smaller and other.priority <= job.priority and other.admitted_at > waits_since


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(300.0, 6000.0)), min_size=40, max_size=40),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_a_job_that_its_teams_guarantee_holds_is_passed_for_a_bounded_time(
    small: list[tuple[int, float]], others: int, lent: int
) -> None:
    """However many smaller ones of its team come, while other teams use what is theirs, and what is lent to them."""
    asked_at = 100.0
    jobs = [(Job(1, "large", "ann", "a", 5, asked_at), 300.0)]
    for number, (size, seconds) in enumerate(small):  # five are there before it
        arrives = 0.0 if number < 5 else asked_at + PASSED_S / 20 * (number - 5)
        jobs.append((Job(10 + number, "small", "ann", "a", size, arrives), seconds))
    jobs += [(Job(2 + number, "other", "bob", "b", 1, 0.0), 1e6) for number in range(others + lent)]
    scene = Scene(5 + others, {"a": Team(5), "b": Team(others)}, tuple(jobs), {})
    made = live(scene)
    began = {id: snapshot.now for snapshot, decision in reversed(made) for id in decision.admit}
    before = [began[job.id] + seconds for job, seconds in jobs if job.name == "small" and began[job.id] <= asked_at]
    assert began[1] <= max(asked_at + PASSED_S, *before) + 2 * STOP_S
    stopped = [(one, snapshot.now) for snapshot, decision in made for one in decision.preempt]
    assert all(one.for_id != 1 or at >= asked_at + PASSED_S or one.victim < 10 for one, at in stopped)


@settings(max_examples=60, deadline=None)
@given(scenes(fixed=True, exact=True))
def test_no_reservation_is_delayed(scene: Scene) -> None:
    """When each runs as long as it may and nobody comes later, all start when the first decision said."""
    made = live(scene)
    first = made[0][1]
    promised = {id: wait.start for id, wait in first.waits.items() if wait.start is not None}
    started = {id: snapshot.now for snapshot, decision in made for id in decision.admit}
    for id, at in promised.items():
        assert started[id] <= at + 1e-6, (id, promised, started)


@settings(max_examples=60, deadline=None)
@given(scenes(fixed=True))
def test_the_first_in_order_starts_never_later_than_was_said(scene: Scene) -> None:
    """Whoever ends early."""
    scene = replace(scene, jobs=tuple((replace(job, submitted_at=0.0), seconds) for job, seconds in scene.jobs))
    said: dict[int, float] = {}
    for snapshot, decision in live(scene):
        for id in decision.admit:
            assert snapshot.now <= said.get(id, math.inf) + 1e-6
        first = {id for id, wait in decision.waits.items() if wait.ahead == 0 and not isinstance(wait.reason, TooLarge)}
        for id in first:
            if (at := decision.waits[id].start) is not None:
                assert at <= said.get(id, math.inf) + 1e-6
                said[id] = at


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_every_waiting_job_has_a_reason_and_it_is_true(scene: Scene) -> None:
    for snapshot, decision in live(scene):
        active = after(snapshot, decision)
        by_id = {job.id: job for job in snapshot.jobs}
        waiting = {job.id for job in snapshot.jobs if not job.active} - set(decision.admit)
        assert decision.waits.keys() == waiting
        for id, wait in decision.waits.items():
            assert sentence(wait, "GPUs", str)
            assert wait.start is None or wait.start > snapshot.now, "it could start at once"
            check(wait.reason, by_id[id], snapshot, active)


def check(reason: Reason, job: Job, snapshot: Snapshot, active: Sequence[Job]) -> None:
    """Against what is there once the decision is carried out, counted anew."""
    now, places, team = snapshot.now, snapshot.pool.places, snapshot.team(job.team)
    mine = [other for other in active if other.team == job.team]
    assert reason.gpus == job.gpus  # type: ignore[union-attr]
    match reason:
        case TooLarge(wanted, most, whose):
            assert wanted > most == (team.maximum if whose else places)
        case NoRoom(wanted, free, holders):
            assert wanted > free == places - gpus(active)
            assert sorted(h.gpus for h in holders) == sorted(other.gpus for other in active)
            assert all((h.until is not None and h.until > now) or h.until is None for h in holders)
        case AtMaximum(wanted, _, used, maximum):
            assert used == gpus(mine) and used + wanted > maximum == team.maximum
        case NotLent(wanted, guaranteed, fixed, common, taken):
            assert not job.preemptible and (guaranteed, common) == (team.guaranteed, snapshot.common)
            firm = {name: gpus([o for o in active if o.team == name and not o.preemptible]) for name in TEAMS}
            assert fixed == min(guaranteed, firm[job.team])
            assert taken == sum(max(0, firm[name] - snapshot.team(name).guaranteed) for name in TEAMS)
            assert wanted > guaranteed - fixed + common - taken
        case Reserved(wanted, at, free, others, ends):
            assert others and now <= at and free < wanted and (ends is None) == (job.limit_s == math.inf)
            assert ends is None or at < ends
        case Reclaiming(_, victims):
            going = sorted(other.gpus for other in active if other.stop is not None and other.stop.for_id == job.id)
            assert going and sorted(victim.gpus for victim in victims) == going
        case _:
            raise AssertionError(reason)


@settings(max_examples=30, deadline=None)
@given(scenes())
def test_the_order_in_which_jobs_are_listed_does_not_matter(scene: Scene) -> None:
    for snapshot, decision in live(scene)[:5]:
        assert decide(replace(snapshot, jobs=tuple(reversed(snapshot.jobs)))) == decision
