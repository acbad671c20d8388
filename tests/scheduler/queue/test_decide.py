"""Who is admitted, who is stopped, and what is said: small scenes with values computed by hand."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rlix.scheduler.queue.decide import PASSED_S, STOP_S, Decision, Preemption, decide
from rlix.scheduler.queue.fair_share import Usage, times_its_share
from rlix.scheduler.queue.jobs import Job, Outcome, Pool, QueueError, Snapshot, State, Stop, Team
from rlix.scheduler.queue.reasons import AtMaximum, Held, Later, NoRoom, NotLent, Reclaiming, Reserved, TooLarge
from rlix.scheduler.queue.reasons import sentence as _sentence
from rlix.scheduler.queue.timeline import Timeline

HOUR = 3600.0


def job(id: int, gpus: int, team: str = "a", *, owner: str = "ann", **rest: Any) -> Job:
    return Job(id, f"j{id}", owner, team, gpus, submitted_at=float(id), **rest)


def running(id: int, gpus: int, team: str = "a", *, since: float = 0.0, **rest: Any) -> Job:
    return job(id, gpus, team, state=State.RUNNING, admitted_at=since, **rest)


def look(places: int, *jobs: Job, now: float = 0.0, teams: Mapping[str, Team] | None = None, **rest: Any) -> Decision:
    return decide(Snapshot(now, Pool(places), jobs, teams or {}, **rest))


def said(decision: Decision, id: int) -> str:
    return _sentence(decision.waits[id], "GPUs", lambda at: f"{int(at // HOUR):02d}:{int(at % HOUR // 60):02d}")


def test_what_fits_starts_in_the_order_of_submission() -> None:
    found = look(8, job(2, 4), job(1, 4), job(3, 1))
    assert found.admit == (1, 2)
    assert found.waits[3].reason == NoRoom(1, 0, found.waits[3].reason.holders)  # type: ignore[union-attr]


def test_a_short_job_is_backfilled_and_one_that_would_delay_the_first_is_not() -> None:
    """8 GPUs, 6 held for 2 h. 4 are wanted by the first; 2 by a job of 1 h and by one of 3 h."""
    held = running(1, 6, limit_s=2 * HOUR - STOP_S)
    found = look(
        8, held, job(2, 4, limit_s=HOUR), job(3, 2, limit_s=3 * HOUR), job(4, 2, limit_s=HOUR - STOP_S), now=0.0
    )
    assert found.admit == (3,)  # 4 + 2 of 8 are enough when the first starts
    found = look(8, held, job(2, 8, limit_s=HOUR), job(3, 2, limit_s=3 * HOUR), job(4, 2, limit_s=HOUR - STOP_S))
    assert found.admit == (4,)
    assert found.waits[2].start == 2 * HOUR
    assert said(found, 2) == (
        "needs 8 GPUs at once, 0 are free; 2 are held by a/j4 (4) until 01:00, 6 are held by a/j1 (1) until 02:00; it "
        "starts by 02:00 if nobody comes before it"
    )
    assert isinstance(found.waits[3].reason, Reserved)
    assert said(found, 3) == (
        "needs 2 GPUs until 03:02, and at most 0 are left from 02:00 on beside what is reserved for a/j2 (2); 1 job is "
        "ahead of it; it starts by 03:02 if nobody comes before it"
    )


def test_a_job_without_a_limit_does_not_overtake_one_that_waits_for_such() -> None:
    found = look(8, running(1, 6), job(2, 4), job(4, 2), now=10.0)
    assert found.admit == (4,)  # beside the 4 of the first there is room for it, whenever that starts
    found = look(8, running(1, 6), job(2, 8), job(3, 2), job(4, 2, limit_s=HOUR), now=10.0)
    assert found.admit == (4,)
    assert found.waits[2].start is None
    assert said(found, 3).startswith("needs 2 GPUs without a time limit, and a/j2 (2) would wait for it: cancel")


def test_a_guarantee_is_lent_and_taken_back() -> None:
    teams = {"a": Team(guaranteed=4), "b": Team(guaranteed=4)}
    lent = (running(1, 4, "b"), running(2, 2, "b", since=5.0), running(3, 2, "b", since=9.0))
    found = look(8, *lent, job(4, 2, "a"), now=60.0, teams=teams)
    assert found.preempt == (Preemption(3, 4),), "the one that began last, and no more than needed"
    assert isinstance(found.waits[4].reason, Reclaiming) and found.waits[4].start == 60.0 + STOP_S
    stopping = replace(lent[2], stop=Stop(60.0, "", for_id=4))
    again = look(8, *lent[:2], stopping, job(4, 2, "a"), now=70.0, teams=teams)
    assert again.preempt == () and again.waits[4].start == 60.0 + STOP_S
    assert said(again, 4).startswith("needs 2 GPUs, for which b/j3 (3) writes a checkpoint and ends")


def test_nobody_is_stopped_for_less_than_a_start() -> None:
    teams = {"a": Team(guaranteed=4)}
    others = (running(1, 5, "b", preemptible=False), running(2, 3, "b"))
    assert look(8, *others, job(3, 4, "a"), teams=teams).preempt == ()


def test_who_may_begin_at_once_when_others_stop_later_does() -> None:
    """2 of 8 GPUs are free for the last until 4 are reserved for the first, for which one of its team makes room."""
    jobs = (
        running(1, 4, "a", priority=-1),
        running(2, 2, "c", preemptible=False, limit_s=HOUR),
        job(3, 4, "d"),
        job(4, 2, "a"),
    )
    found = look(8, *jobs, used={("a", "ann"): 9.0})
    assert found.waits[3].start == HOUR + STOP_S
    assert found.preempt == (Preemption(1, 4),) and found.admit == (4,)


def test_what_cannot_be_preempted_borrows_only_what_is_nobodys() -> None:
    teams = {"a": Team(guaranteed=2), "b": Team(guaranteed=4)}
    fixed = {"preemptible": False}
    found = look(8, job(1, 2, "a", **fixed), job(2, 2, "a", **fixed), job(3, 2, "a", **fixed), job(4, 4), teams=teams)
    assert found.admit == (1, 2, 4)
    assert found.waits[3].reason == NotLent(2, guaranteed=2, fixed=2, common=2, taken=2)
    assert "it will never start" not in said(found, 3)


def test_what_is_lent_is_counted_by_gpus() -> None:
    """3 of a team's guarantee of 4 are held: of 3 more, two are lent."""
    teams, fixed = {"a": Team(guaranteed=4)}, {"preemptible": False}
    held = running(1, 3, "a", **fixed)
    assert look(6, held, job(2, 3, "a", **fixed), teams=teams).admit == (2,)
    found = look(6, held, running(2, 2, "a", **fixed), job(3, 2, "a", **fixed), teams=teams)
    assert found.waits[3].reason == NotLent(2, guaranteed=4, fixed=4, common=2, taken=1)


@pytest.mark.parametrize("lender", [{"preemptible": False}, {"preemptible": True}])
def test_a_job_that_needs_its_teams_whole_guarantee_is_not_passed_for_ever(
    lender: dict[str, Any],
) -> None:
    """One of 1 GPU runs when it comes; every hour another one comes. Without it 3 are free, or lent but for one."""
    fixed: dict[str, Any] = {"preemptible": False, "limit_s": HOUR - STOP_S}
    teams = {"a": Team(guaranteed=4), "b": Team(guaranteed=4)}
    others = running(1, 4, "b", **lender), running(2, 2, "b", preemptible=True)
    small, large, next_ = running(3, 1, "a", **fixed), job(4, 4, "a", **fixed), job(5, 1, "a", **fixed)
    found = look(8, *others, small, large, next_, now=0.5 * HOUR, teams=teams)
    assert found.admit == () and found.preempt == ()
    reason = found.waits[5].reason
    assert isinstance(reason, Reserved) and reason.others == ("a/j4 (4)",)
    assert " left to jobs of team a that cannot be preempted from 01:00 on beside" in said(found, 5)
    short = replace(next_, limit_s=0.5 * HOUR - STOP_S)
    assert look(8, *others, small, large, short, now=0.5 * HOUR, teams=teams).admit == (5,), "it ends before"
    found = look(8, *others, large, next_, now=HOUR, teams=teams)
    assert found.preempt == (Preemption(2, 4),) and found.admit == ()


@pytest.mark.parametrize(("first", "large", "small"), [(4, 4, 3), (2, 8, 2)])
def test_one_that_waits_for_what_is_lent_is_passed_by_none_of_its_team(first: int, large: int, small: int) -> None:
    """4 are guaranteed to it, and 4 to nobody, of which another team has one for an hour. There is room in the pool."""
    fixed: dict[str, Any] = {"preemptible": False, "limit_s": HOUR - STOP_S}
    held = running(1, first, "a", **(fixed | {"limit_s": 20 * HOUR if large == 4 else HOUR - STOP_S}))
    waits = job(3, large, "a", preemptible=False, limit_s=9 * HOUR)
    passes = job(4, small, "a", preemptible=False, limit_s=9 * HOUR)
    teams = {"a": Team(guaranteed=4), "b": Team(guaranteed=8)}
    found = look(16, held, running(2, 1, "c", **fixed), waits, passes, teams=teams)
    assert found.admit == () and found.waits[3].start == HOUR
    assert isinstance(found.waits[4].reason, Reserved) and found.waits[4].reason.others == ("a/j3 (3)",)
    assert look(16, held, running(2, 1, "c", **fixed), waits, replace(passes, **fixed), teams=teams).admit == (4,)


def test_a_job_takes_the_place_of_smaller_ones_that_passed_it_for_long() -> None:
    """4 are guaranteed to its team, and all are its team's from before it had waited for long."""
    teams = {"a": Team(guaranteed=4), "b": Team(guaranteed=4)}
    lent, large = running(1, 8, "b"), job(4, 4, "a")
    first, second = running(5, 2, "a", since=100.0), running(6, 2, "a", since=200.0)
    late = large.submitted_at + PASSED_S
    assert look(12, lent, large, first, second, now=late - 1.0, teams=teams).preempt == ()
    found = look(12, lent, large, first, second, now=late, teams=teams)
    assert found.preempt == (Preemption(6, 4), Preemption(5, 4)), "and nobody of the other team"
    stopping = [replace(small, stop=Stop(late, "", for_id=4)) for small in (first, second)]
    assert look(12, lent, large, *stopping, now=late + 1.0, teams=teams).preempt == ()
    for other in (
        running(3, 2, "a", since=1.0),  # it began before
        replace(second, priority=1),
        replace(second, preemptible=False),
        replace(second, owner="bob"),  # who had less, and so is ahead of it
    ):
        rest = look(12, lent, large, first, other, now=late, teams=teams, used={("a", "ann"): 9.0})
        assert rest.preempt == () and rest.admit == (), "it would not begin all the same"
    half = look(12, lent, replace(large, gpus=3), first, running(3, 1, "a"), job(7, 1), now=late, teams=teams)
    assert half.preempt == (Preemption(5, 4),), "one of 3 is free"


def test_one_that_was_passed_does_not_take_what_is_guaranteed_to_another_team() -> None:
    """4 of 8 are free, and b's; team a, which has used less, has its 4."""
    teams, used = {"a": Team(guaranteed=4), "b": Team(guaranteed=4)}, {("b", "ann"): 9.0}
    large, first, second = job(4, 4, "a"), running(5, 2, "a", since=100.0), running(6, 2, "a", since=200.0)
    late = large.submitted_at + PASSED_S
    found = look(8, large, first, second, job(7, 4, "b"), now=late, teams=teams, used=used)
    assert found.admit == (7,)
    assert found.preempt == (Preemption(6, 4), Preemption(5, 4))
    assert look(8, large, first, second, now=late, teams=teams).admit == (4,), "nobody else wants them"


def test_none_that_cannot_be_stopped_passes_one_that_has_waited_for_long() -> None:
    teams, fixed = {"a": Team(guaranteed=4)}, {"preemptible": False}
    held, large, next_ = running(1, 1, "a", limit_s=HOUR), job(2, 4, "a"), job(3, 1, "a", **fixed)
    assert look(4, held, large, next_, now=10.0, teams=teams).admit == (3,)
    assert look(4, held, large, next_, now=2.0 + PASSED_S, teams=teams).admit == ()


def test_priority_and_being_preemptible_are_two_things() -> None:
    low, fixed = running(1, 8, priority=-1), running(1, 8, priority=-1, preemptible=False)
    assert look(8, low, job(2, 8, priority=1)).preempt == (Preemption(1, 2),)
    assert look(8, fixed, job(2, 8, priority=1)).preempt == ()
    assert look(8, low, job(2, 8, "b", priority=1)).preempt == (), "no team is stopped by what another one calls high"
    assert look(8, job(2, 8), job(3, 8, priority=1)).admit == (3,)


def test_a_team_stays_below_its_maximum_and_leaves_the_rest_to_others() -> None:
    teams = {"a": Team(maximum=4)}
    found = look(8, running(1, 3, "a"), job(2, 2, "a"), job(3, 5, "b"), job(4, 6, "a"), job(5, 9, "b"), teams=teams)
    assert found.admit == (3,)
    assert found.waits[2].reason == AtMaximum(2, "a", 3, 4)
    assert found.waits[4].reason == TooLarge(6, 4, "team a") and found.waits[5].reason == TooLarge(9, 8, "")
    assert said(found, 4) == "needs 6 GPUs at once, and team a has at most 4"


def test_the_team_that_had_less_for_its_weight_is_next_then_the_owner() -> None:
    used = {("a", "ann"): 300.0, ("b", "bob"): 100.0, ("b", "ben"): 100.0}
    jobs = (job(1, 8, "a"), job(2, 8, "b", owner="bob"), job(3, 8, "b", owner="ben"), job(4, 8, "b", owner="new"))
    assert look(8, *jobs, used=used).admit == (4,)
    heavy = {"a": Team(weight=2.0)}
    assert look(8, *jobs, used=used, teams=heavy).admit == (1,), "300 / 2 is less than 200 / 1"
    snapshot = Snapshot(0.0, Pool(8), jobs, heavy, used)
    share = times_its_share(snapshot, "a")
    assert share == pytest.approx((300 / 500) / (2 / 3))


def test_usage_decays_by_half_in_a_half_life() -> None:
    usage = Usage(half_life_s=100.0)
    usage.charge("a", "ann", 8.0, at=0.0)
    usage.charge("a", "ann", 4.0, at=100.0)
    assert usage.at(100.0) == {("a", "ann"): pytest.approx(8.0)}
    usage.charge("a", "ann", 4.0, at=0.0)  # known late
    assert usage.at(200.0) == {("a", "ann"): pytest.approx(5.0)}


def test_held_and_tried_again_later() -> None:
    held = job(1, 1, state=State.HELD, why="bob")
    late = job(2, 1, failures=2, not_before=7200.0, why="node n1 left")
    found = look(8, held, late, now=0.0)
    assert found.admit == () and found.waits[1].reason == Held("bob")
    assert found.waits[2].reason == Later(2, 7200.0, "node n1 left")
    assert said(found, 2) == "came back 2 times in a row (node n1 left) and is tried again at 02:00"


def test_states_have_their_ways() -> None:
    done = running(1, 1).become(State.ENDED, 5.0)
    assert done.become(State.SUBMITTED, 6.0).since == 6.0
    with pytest.raises(QueueError, match=r"job 1 \(j1\) is ended, and cannot become held"):
        done.become(State.HELD, 6.0)


def test_a_job_that_should_have_ended_holds_nobody_up_for_long() -> None:
    over = running(1, 8, limit_s=60.0, stop=Stop(60.0, "its time limit is over", Outcome.TIMEOUT))
    assert look(8, over, job(2, 8), now=1000.0).waits[2].start == 1001.0


def test_a_timeline() -> None:
    line = Timeline(0.0, 8)
    line.take(0.0, 10.0, 6)
    line.take(20.0, 30.0, 5)
    assert [line.free(t) for t in (0.0, 10.0, 20.0, 29.9, 30.0)] == [2, 8, 3, 3, 8]
    assert line.earliest(0.0, 10.0, 8) == 10.0 and line.earliest(0.0, 11.0, 8) == 30.0
    assert line.earliest(0.0, 100.0, 3) == 10.0 and line.earliest(12.0, 1.0, 9) == math.inf
    assert line.shortage(12.0, 20.0, 8) is None and line.shortage(12.0, 21.0, 8) == 20.0


def test_one_of_something_is_said_as_one_and_what_never_starts_is_said_to() -> None:
    found = look(1, running(1, 1), job(2, 1))
    assert said(found, 2).startswith("needs 1 GPU at once, 0 are free; 1 is held by a/j1 (1)")
    teams = {"a": Team(guaranteed=2), "b": Team(guaranteed=4)}
    never = look(8, job(1, 5, preemptible=False), teams=teams)
    assert "and of the 2 guaranteed to nobody 0; it will never start while shares are as they are" in said(never, 1)
