"""The function that decides about a lease: what it says follows from what was seen, and is the same asked again."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rlix.control.reconcile import (
    Action,
    Free,
    Hold,
    Kill,
    Leaving,
    Look,
    Part,
    Quarantine,
    Release,
    Rest,
    Sight,
    Take,
    reconcile,
)
from rlix.control.settings import Settings
from rlix.protocol.messages import UNSEEN, Lease, LeaseState, LeaseStatus, Occupant, Process, ReleaseReason
from rlix.protocol.types import Phase

SETTINGS = Settings(home=Path("unused"))
LEASE = Lease(7, "ft_1", "actor_train", Phase.ACTOR_TRAINING, (0, 1), longest_s=30.0)
TIMES = st.integers(0, 40).map(float)
UNSEEN_1 = Occupant(1, "pool", UNSEEN, ())
LATER = st.one_of(TIMES, st.just(float("inf")))

occupants = st.builds(
    lambda device, pids: Occupant(device, "pool", 7, tuple(Process("node", pid, 1) for pid in pids)),
    st.sampled_from(LEASE.devices),
    st.lists(st.integers(1, 3), unique=True, max_size=2),
)
sights = st.builds(
    lambda asked_at, took_s, there: Sight(asked_at, asked_at + took_s, tuple(there)),
    TIMES,
    st.integers(0, 3).map(float),
    st.lists(occupants, max_size=2),
)
leavings = st.builds(
    lambda reason, look_from, later_s, given: Leaving("why", reason, look_from, look_from + later_s, given),
    st.sampled_from(ReleaseReason),
    TIMES,
    st.integers(0, 10).map(float),
    st.booleans(),
)
holds = st.builds(
    Hold,
    note_by=LATER,
    ends_by=LATER,
    parts=st.lists(st.builds(Part, st.sampled_from([(0,), (1,), (0, 1)]), TIMES, TIMES), max_size=2).map(tuple),
    leaving=st.none() | leavings,
    sight=st.none() | sights,
    awaited_by=TIMES,
    killed=st.booleans(),
    pause_s=st.sampled_from([0.0, 2.0, 60.0]),
)
states = st.sampled_from(LeaseState)


@given(states, holds, TIMES)
def test_nothing_ends_and_nobody_is_ended_but_by_what_was_just_seen(state: LeaseState, hold: Hold, now: float) -> None:
    action = reconcile(LeaseStatus(LEASE, state), hold, now, SETTINGS)
    sight, leaving = hold.sight, hold.leaving
    if isinstance(action, Kill | Quarantine) or (isinstance(action, Release) and state is not LeaseState.PENDING):
        assert leaving is not None
        assert sight is not None
        assert sight.asked_at >= leaving.look_from
        assert now < sight.seen_at + 1.0
    if isinstance(action, Release) and state is not LeaseState.PENDING:
        assert sight is not None
        assert sight.there == ()
    if isinstance(action, Kill):
        assert leaving is not None
        assert sight is not None
        assert now >= leaving.kill_from
        assert set(action.processes) <= {process for occupant in sight.there for process in occupant.processes}
    if isinstance(action, Free) and action.devices:
        assert sight is not None
        assert not sight.of(action.devices)
        assert set(action.devices) < set(LEASE.devices)


def test_a_gang_that_gives_a_part_back_keeps_the_rest_while_its_node_does_not_answer() -> None:
    part, locked = Part((1,), 0.0, 2.0), Occupant(1, "pool", 7, (Process("node", 1, 1),))

    def decided(there: Occupant, now: float) -> Action:
        hold = Hold(parts=(part,), sight=Sight(3.0, 13.0, (there,)))
        return reconcile(LeaseStatus(LEASE, LeaseState.ACTIVE), hold, now, SETTINGS)

    assert decided(locked, 13.0) == Take(
        "its holder says that its bytes are gone, but device 1 is still locked by process 1"
    )
    assert decided(UNSEEN_1, 13.0) == decided(UNSEEN_1, 13.9) == Rest(14.0)  # not as if it were about to let go


def test_a_device_that_nobody_could_look_at_is_not_said_to_be_locked() -> None:
    hold = Hold(leaving=Leaving("it hangs", ReleaseReason.KILLED, 0.0, 0.0), sight=Sight(1.0, 1.0, (UNSEEN_1,)))
    action = reconcile(LeaseStatus(LEASE, LeaseState.DRAINING), hold, 1.0, SETTINGS)
    why = "it hangs; and device 1 cannot be looked at, for its node does not answer"
    assert action == Quarantine(why, SETTINGS.quarantine_retry_s)


@given(states, holds, TIMES)
def test_it_waits_for_a_time_that_comes_and_looks_at_nobody_twice_at_once(
    state: LeaseState, hold: Hold, now: float
) -> None:
    status = LeaseStatus(LEASE, state)
    action = reconcile(status, hold, now, SETTINGS)
    if isinstance(action, Rest):
        assert action.until > now
    if isinstance(action, Look):
        hold = replace(hold, parts=tuple(replace(part, since=min(part.since, now)) for part in hold.parts))
        asked = replace(hold, awaited_by=now + 30.0)
        assert reconcile(status, asked, now, SETTINGS) == Rest(now + 30.0)
        seen = replace(hold, sight=Sight(now, now, ()), awaited_by=0.0)
        assert not isinstance(reconcile(status, seen, now, SETTINGS), Look)
