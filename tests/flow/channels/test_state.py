"""What a channel knows: conservation, order, room and ends, under losses of producers and consumers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.flow.channels.state import ChannelState, Want
from rlix.protocol.errors import ChannelError

PRODUCERS, CONSUMERS, GROUPS = ("p", "q"), ("c", "d"), ("train", "log")
steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "take", "take", "ack", "back", "lose", "again", "repeat"]),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(1, 3),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 4), st.sampled_from([None, 5]))
def test_nothing_acknowledged_is_lost_doubled_or_out_of_order(
    script: list[tuple[str, int, int, int]], capacity: int, capacity_bytes: int | None
) -> None:
    state = ChannelState(capacity, capacity_bytes, GROUPS)
    for name in PRODUCERS:
        state.register(name)
    accepted: list[tuple[str, int]] = []
    held: dict[tuple[str, str], dict[int, tuple[str, int]]] = {(c, g): {} for c in CONSUMERS for g in GROUPS}
    done: dict[str, list[tuple[str, int]]] = {g: [] for g in GROUPS}

    def act(kind: str, producer: str, consumer: str, group: str, size: int) -> None:
        mine = held[consumer, group]
        if kind == "put" and producer in state.producers and state.has_room(size):
            sequence = state.sequence(producer)
            assert state.put(producer, sequence, weight=size, nbytes=size) is not None
            accepted.append((producer, sequence))
        elif kind == "repeat" and producer in state.producers and state.sequence(producer):
            assert state.put(producer, state.sequence(producer) - 1) is None
        elif kind == "take" and len(state.producers) == 2:
            items = state.take(consumer, Want(size), group)
            for name in PRODUCERS:  # of one producer, what is handed out is in order
                numbers = [item.sequence for item in items if item.producer == name]
                assert numbers == sorted(numbers)
            mine |= {item.id: (item.producer, item.sequence) for item in items}
        elif kind == "ack":
            state.acknowledge(consumer, list(mine), group)
            done[group] += mine.values()
            mine.clear()
        elif kind == "back":
            state.give_back(consumer)
            for name in GROUPS:
                held[consumer, name].clear()
        elif kind == "lose":
            state.lose_producer(producer)
        elif kind == "again" and producer not in state.producers:
            assert state.register(producer) == len([a for a in accepted if a[0] == producer])

    for kind, producer, consumer, size in script:
        act(kind, PRODUCERS[producer], CONSUMERS[consumer], GROUPS[size % 2], size)
        assert len(state.items) <= capacity
        assert capacity_bytes is None or state.nbytes <= capacity_bytes or len(state.items) == 1
    for name in PRODUCERS:
        act("again", name, "c", GROUPS[0], 1)
        state.close(name)
    for group in GROUPS:
        for consumer in CONSUMERS:
            state.give_back(consumer)
        while items := state.take("c", Want(3), group):
            state.acknowledge("c", [item.id for item in items], group)
            done[group] += [(item.producer, item.sequence) for item in items]
        assert state.ended(group)
        assert sorted(done[group]) == sorted(accepted)
    assert not state.items


def test_the_end_waits_for_what_may_come_back() -> None:
    state = ChannelState(2)
    state.register("p")
    state.put("p", 0)
    state.close("p")
    state.take("c")
    assert not state.ended()
    state.give_back("c")
    (item,) = state.take("d")
    state.acknowledge("c", [item.id])  # no longer its own
    assert not state.ended()
    state.acknowledge("d", [item.id])
    assert state.ended()
    with pytest.raises(ChannelError, match="the stream has ended"):
        state.register("late")


def test_the_rest_of_a_lost_producers_stream_is_an_error() -> None:
    state = ChannelState(2)
    state.register("p")
    state.put("p", 0)
    state.lose_producer("p")
    (item,) = state.take("c")
    assert state.take("d") == []  # it may still come back
    state.acknowledge("c", [item.id])
    with pytest.raises(ChannelError, match="producer 'p' ended without closing"):
        state.take("c")
    assert state.register("p") == 1
    assert state.take("c") == []
    with pytest.raises(ChannelError, match="put item 2, but 1 is next"):
        state.put("p", 2)


def test_keys_weights_and_a_rule_of_the_users_own() -> None:
    state = ChannelState(9)
    state.register("p")
    for n, (key, weight) in enumerate([("a", 5.0), ("b", 2.0), ("a", 1.0), ("b", 3.0)]):
        state.put("p", n, key, weight)
    assert [i.sequence for i in state.take("c", Want(9, "b", 4.0))] == [1]
    assert [i.sequence for i in state.take("c", Want(9, weight=6.0))] == [0, 2]
    assert [i.sequence for i in state.take("c", Want(9, weight=1.0))] == [3]
    heaviest = ChannelState(9, rule=lambda items, want: [max(items, key=lambda i: i.weight).id] if items else [])
    heaviest.register("p")
    for n, weight in enumerate([1.0, 3.0, 2.0]):
        heaviest.put("p", n, weight=weight)
    assert [heaviest.take("c")[0].weight for _ in range(3)] == [3.0, 2.0, 1.0]
    broken = ChannelState(9, rule=lambda items, want: [7])
    broken.register("p")
    with pytest.raises(ChannelError, match="chose \\[7\\]"):
        broken.take("c")


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        ChannelState(0)
    with pytest.raises(ValueError, match="different names"):
        ChannelState(1, groups=("a", "a"))
    with pytest.raises(ChannelError, match="no consumer group 'x'"):
        ChannelState(1).take("c", group="x")
