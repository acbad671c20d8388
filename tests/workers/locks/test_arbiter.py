"""Turns on devices: never two on one device, in order, and never stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.protocol.errors import DeadlockError
from rlix.workers.locks.arbiter import Arbiter

HOLDERS = ("gen", "score", "train")
steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "leave", "withdraw", "again"]),
        st.integers(0, 2),
        st.sets(st.integers(0, 3), min_size=1),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(steps)
def test_no_device_has_two_and_nobody_waits_for_ever(script: list[tuple[str, int, set[int], int]]) -> None:
    arbiter = Arbiter()
    for kind, who, devices, order in script:
        holder = HOLDERS[who]
        mine = [turn for turn in arbiter.held.values() if turn.holder == holder]
        if kind == "ask" and not mine:
            arbiter.ask(holder, devices, (order,))
        elif kind == "again" and mine:
            depth = arbiter.depth[mine[0].id]
            assert arbiter.ask(holder, mine[0].devices) is mine[0]
            assert arbiter.depth[mine[0].id] == depth + 1
        elif kind == "leave" and mine:
            arbiter.leave(mine[0].id)
        elif kind == "withdraw" and arbiter.waiting:
            arbiter.withdraw(min(arbiter.waiting))
        for turn in arbiter.grant():
            for other in arbiter.held.values():
                assert other is turn or not turn.devices & other.devices
        assert arbiter.grant() == []
        assert arbiter.held.keys() == arbiter.depth.keys()
        assert not arbiter.held.keys() & arbiter.waiting.keys()
    while arbiter.held or arbiter.waiting:
        assert arbiter.held, f"stuck: {[arbiter.explain(turn) for turn in arbiter.waiting.values()]}"
        for id in list(arbiter.held):
            while not arbiter.leave(id):
                pass
        arbiter.grant()


def test_turns_go_by_order_then_by_who_asked_first() -> None:
    arbiter = Arbiter()
    first = arbiter.ask("gen", {0, 1}, (1,))
    assert arbiter.grant() == [first]
    later = arbiter.ask("score", {1}, (2,))
    sooner = arbiter.ask("train", {0, 1}, (0,))
    assert arbiter.grant() == []
    assert arbiter.explain(later) == "gen (devices [0, 1]), train (devices [0, 1])"
    assert arbiter.leave(first.id)
    assert arbiter.grant() == [sooner]
    arbiter.leave(sooner.id)
    assert arbiter.grant() == [later]


def test_what_would_close_a_circle_is_refused() -> None:
    arbiter = Arbiter()
    arbiter.ask("gen", {0})
    arbiter.ask("train", {1})
    arbiter.grant()
    with pytest.raises(DeadlockError, match=r"gen has devices \[0\] and may not wait for \[1\]"):
        arbiter.ask("gen", {0, 1})
