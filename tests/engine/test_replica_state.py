import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.inference.replica_state import ReplicaPhase, ReplicaState, ReplicaStateError
from rlix.protocol.errors import NotResidentError, StaleEpochError


def test_the_life_of_a_replica() -> None:
    state = ReplicaState()
    with pytest.raises(NotResidentError, match="off"):
        state.check_ready()
    state = state.load(3)
    state.check_resident()
    with pytest.raises(NotResidentError, match="loading"):
        state.check_ready()
    state = state.loaded()
    state.check_ready()
    state = state.drain(3)
    with pytest.raises(NotResidentError, match="draining"):
        state.check_ready()
    with pytest.raises(ReplicaStateError, match="while draining"):
        state.load(4)
    assert state.off().phase is ReplicaPhase.OFF


def test_a_lease_that_was_given_back_never_loads_again() -> None:
    state = ReplicaState().load(3).loaded().drain(3).off()
    with pytest.raises(StaleEpochError, match="load under lease 3"):
        state.load(3)
    assert state.load(4).epoch == 4


def test_an_offload_that_arrives_before_its_load_fences_it() -> None:
    state = ReplicaState().drain(5).off()
    with pytest.raises(StaleEpochError):
        state.load(5)


def test_a_late_offload_does_not_end_a_newer_lease() -> None:
    with pytest.raises(StaleEpochError, match="works under lease 7"):
        ReplicaState().load(7).loaded().drain(6)


def test_dead_goes_back_to_ready_only_through_loading() -> None:
    dead = ReplicaState().load(1).dead()
    with pytest.raises(ReplicaStateError):
        dead.loaded()
    with pytest.raises(NotResidentError, match="dead"):
        dead.check_resident()
    dead.load(1).loaded().check_ready()


@given(st.lists(st.tuples(st.sampled_from(["load", "loaded", "drain", "off", "dead"]), st.integers(0, 5))))
def test_no_sequence_of_events_makes_a_fenced_lease_ready(events: list[tuple[str, int]]) -> None:
    state = ReplicaState()
    fence = 0
    for event, epoch in events:
        method = getattr(state, event)
        try:
            state = method(epoch) if event in ("load", "drain") else method()
        except (StaleEpochError, ReplicaStateError):
            continue
        fence = max(fence, epoch) if event == "drain" else fence
        assert state.fence == fence
        if state.phase in (ReplicaPhase.READY, ReplicaPhase.LOADING):
            assert state.epoch > fence or state.epoch == 0
