"""Turns on devices: never two on one device, in order, never stuck, and given back by the dead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.flow.locks.arbiter import Arbiter
from rlix.protocol.errors import DeadlockError

HOLDERS = ("gen", "score", "train")
steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "leave", "lose", "withdraw", "again"]),
        st.integers(0, 2),
        st.sets(st.integers(0, 3), min_size=1),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=40,
)


@given(steps)
def test_no_device_has_two_and_nobody_waits_for_ever(script: list[tuple[str, int, set[int], int, bool]]) -> None:
    arbiter = Arbiter()
    asked = 0
    for kind, who, devices, order, follows in script:
        holder = HOLDERS[who]
        mine = [turn for turn in arbiter.held.values() if turn.holder == holder]
        if kind == "ask" and not mine:
            after = [asked - 1] if follows and asked else []
            arbiter.ask(holder, devices, (order,), after=after)
            asked += 1
        elif kind == "again" and mine:
            depth = arbiter.depth[mine[0].id]
            assert arbiter.ask(holder, mine[0].devices) is mine[0]
            assert arbiter.depth[mine[0].id] == depth + 1
        elif kind == "leave" and mine:
            arbiter.leave(mine[0].id)
        elif kind == "lose":
            arbiter.lose(holder)
        elif kind == "withdraw" and arbiter.waiting:
            arbiter.withdraw(min(arbiter.waiting))
        for turn in arbiter.grant():
            for other in arbiter.held.values():
                assert other is turn or not turn.devices & other.devices
            assert not turn.after & (arbiter.waiting.keys() | arbiter.held.keys())
        assert arbiter.grant() == []
        assert arbiter.held.keys() == arbiter.depth.keys()
        assert not arbiter.held.keys() & arbiter.waiting.keys()
    while arbiter.held or arbiter.waiting:
        assert arbiter.held, f"stuck: {[arbiter.explain(turn) for turn in arbiter.waiting.values()]}"
        for id in list(arbiter.held):
            while not arbiter.leave(id):
                pass
        arbiter.grant()


def test_a_child_goes_after_its_parent_and_others_by_order() -> None:
    arbiter = Arbiter()
    parent = arbiter.ask("gen", {0, 1}, (1,))
    assert arbiter.grant() == [parent]
    child = arbiter.ask("train", {0, 1}, (0,), after=[parent.id])
    other = arbiter.ask("score", {1}, (2,))
    assert arbiter.grant() == []
    assert arbiter.explain(child) == "gen (devices [0, 1]), gen (devices [0, 1])"
    assert arbiter.leave(parent.id)
    assert arbiter.grant() == [child]
    arbiter.leave(child.id)
    assert arbiter.grant() == [other]


def test_a_turn_of_several_parties_begins_when_all_have_asked() -> None:
    arbiter = Arbiter()
    first = arbiter.ask("gen", {0}, parties=("rank 0", "rank 1"), party="rank 0")
    assert arbiter.grant() == []
    assert arbiter.explain(first) == "gen's rank 1 to ask"
    second = arbiter.ask("gen", {0}, parties=("rank 0", "rank 1"), party="rank 1")
    assert second.id == first.id
    assert [turn.id for turn in arbiter.grant()] == [first.id]


def test_what_would_close_a_circle_is_refused_and_the_dead_give_back() -> None:
    arbiter = Arbiter()
    arbiter.ask("gen", {0})
    arbiter.ask("train", {1})
    arbiter.grant()
    with pytest.raises(DeadlockError, match=r"gen has devices \[0\] and may not wait for \[1\]"):
        arbiter.ask("gen", {0, 1})
    with pytest.raises(ValueError, match=r"after turns \[9\]"):
        arbiter.ask("score", {1}, after=[9])
    waiting = arbiter.ask("score", {0, 1})
    arbiter.lose("gen")
    assert arbiter.grant() == []
    arbiter.lose("train")
    assert arbiter.grant() == [waiting]
