"""What a channel knows: conservation, order, room and ends, under losses of producers and consumers."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.flow.channels.channel import Channel, Producer
from rlix.flow.channels.codec import Parcel, pack
from rlix.flow.channels.state import ChannelState, Want
from rlix.protocol.errors import ChannelError, SpecError

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
            sequence = state.adopt(producer)
            assert state.put(producer, sequence, weight=size, nbytes=size) is not None
            accepted.append((producer, sequence))
        elif kind == "repeat" and producer in state.producers and state.adopt(producer):
            assert state.put(producer, state.adopt(producer) - 1) is None
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


def test_a_put_that_nobody_knows_of_costs_no_other_item() -> None:
    state = ChannelState(4)
    state.register("p")
    state.put("p", 0)
    assert state.withdraw("p", 0)  # it had come
    assert not state.withdraw("p", 1)
    assert state.put("p", 1) is None  # it comes late
    assert state.put("p", 2) is not None
    assert [item.sequence for item in state.take("c", Want(4))] == [0, 2]


class Interrupted:
    """A channel whose first put ends in Ctrl-C, before or after the item went in."""

    _timeout_s = 1.0

    def __init__(self, state: ChannelState, late: bool) -> None:
        self.state, self.late, self.calls = state, late, 0

    def _pack(self, item: str) -> Parcel:
        return pack(item, None, item)

    def _call(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        if method == "withdraw":
            return self.state.withdraw(*args)
        self.calls += 1
        if self.calls > 1 or self.late:
            self.state.put(args[0], args[1])
        if self.calls == 1:
            raise KeyboardInterrupt
        return None


@pytest.mark.parametrize(("late", "numbers"), [(True, [0, 1]), (False, [1])])
def test_the_put_after_an_interrupted_one_is_not_taken_for_it(late: bool, numbers: list[int]) -> None:
    state = ChannelState(4)
    state.register("p")
    channel: Any = Interrupted(state, late)
    producer: Producer[str] = Producer(channel, "p")
    producer._pid = os.getpid()
    with pytest.raises(KeyboardInterrupt):
        producer.put("first")
    producer.put("second")
    assert [item.sequence for item in state.take("c", Want(4))] == numbers


def test_only_the_open_and_the_lost_are_adopted() -> None:
    state = ChannelState(4)
    for name in "pq":
        state.register(name)
        state.put(name, 0)
    state.lose_producer("p")
    assert (state.adopt("p"), state.adopt("q")) == (1, 1)
    assert state.producers == ("p", "q")
    state.close("p")
    with pytest.raises(ChannelError, match="producer 'p' has closed"):
        state.adopt("p")


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


def test_a_channel_that_makes_no_sense_is_refused_without_an_actor() -> None:
    with pytest.raises(ValueError, match="must be a whole number from 1 on, got 0"):
        Channel(0)
    with pytest.raises(ValueError, match="must be a whole number from 1 on, got 0"):
        Channel(4, capacity_bytes=0)
    with pytest.raises(ValueError, match="one or more different names"):
        Channel(4, groups=("a", "a"))
    for wrong in ({"capacity": "a"}, {"capacity": 1.5}, {"capacity": 4, "capacity_bytes": "1"}):
        with pytest.raises(SpecError, match="must be a whole number from 1 on, got"):
            Channel(**wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"groups=3 is not a list of names"):
        Channel(4, groups=3)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="rule is a function"):
        Channel(4, rule="oldest")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"write groups=\('train',\)"):
        Channel(4, groups="train")
    for count in (0, 1.5, "2"):
        with pytest.raises(SpecError, match="count is a whole number from 1 on"):
            Want(count=count)  # type: ignore[arg-type]


def test_who_asks_a_channel_wrongly_is_told_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "__init__", lambda channel: setattr(channel, "name", "tasks"))
    monkeypatch.setattr(Channel, "_call", lambda *_, **__: pytest.fail("it was asked"))
    channel: Any = Channel()  # type: ignore[call-arg]
    with pytest.raises(SpecError, match=r"a `Want`, such as Want\(count=3\), not 3"), channel.take(3):
        pass
    assert Want(count=np.int64(2), weight=np.float32(1)).count == 2  # type: ignore[arg-type]
    for wrong in ({"key": 3}, {"weight": "a"}):
        with pytest.raises(SpecError, match="an item's key is text and its weight a number"):
            Producer(channel, "p").put(1, **wrong)
        with pytest.raises(SpecError, match="an item's key is text and its weight a number"):
            Want(**wrong)  # type: ignore[arg-type]


def test_a_full_channel_with_groups_says_which_of_them_is_behind() -> None:
    state = ChannelState(2, groups=("train", "log"))
    state.register("p")
    state.put("p", 0)
    state.acknowledge("c", [item.id for item in state.take("c", group="train")], "train")
    assert state.describe() == state.describe("log") == "1/2 items queued, open producers: p"
    state.take("logger", group="log")
    assert state.describe() == "0/2 items queued, 1 with logger, open producers: p"
