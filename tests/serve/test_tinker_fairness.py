"""Whose turn it is among the Tinker server's clients."""

from hypothesis import given
from hypothesis import strategies as st

from rlix.serve.tinker.fairness import FairOrder

ALICE, BOB, CAROL = ("a", "alice", "m1"), ("a", "bob", "m2"), ("b", "carol", "m3")


def turns(order: FairOrder, waiting: list[tuple[str, ...]], count: int, seconds: float = 1.0) -> list[str]:
    found = []
    for _ in range(count):
        found.append(chosen := order.next(waiting))
        order.charge(chosen, seconds)
    return [path[-1] for path in found]


def test_teams_have_turns_by_weight_and_their_users_share_them() -> None:
    order = FairOrder(lambda place: 2.0 if place == ("b",) else 1.0)
    found = turns(order, [ALICE, BOB, CAROL], 12)
    assert [found.count(name) for name in ("m1", "m2", "m3")] == [2, 2, 8]


def test_models_of_one_user_take_turns() -> None:
    assert turns(FairOrder(), [("a", "alice", "m1"), ("a", "alice", "m2")], 4) == ["m1", "m2", "m1", "m2"]


def test_who_comes_back_begins_where_the_others_are() -> None:
    order = FairOrder()
    turns(order, [ALICE], 100)
    assert turns(order, [ALICE, BOB], 4).count("m2") == 2  # alone it took nothing from anybody
    turns(order, [BOB], 100)
    assert turns(order, [ALICE, BOB], 6).count("m1") in (3, 4)  # nor has it saved up its turns


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4),
    chunks=st.lists(st.floats(0.01, 2.0), min_size=50, max_size=120),
)
def test_of_those_that_always_wait_none_is_more_than_a_turn_ahead(weights: list[float], chunks: list[float]) -> None:
    """The bound of start-time fair queueing: two differ by the longest turn over each one's weight."""
    places = [(f"t{number}", "u", "m") for number in range(len(weights))]
    order = FairOrder(lambda place: weights[int(place[0][1:])] if len(place) == 1 else 1.0)
    given = dict.fromkeys(places, 0.0)
    for seconds in chunks:
        chosen = order.next(places)
        order.charge(chosen, seconds)
        given[chosen] += seconds
        of_weight = [given[place] / weight for place, weight in zip(places, weights, strict=True)]
        longest = max(chunks) * (1 / min(weights) + 1 / min(weights))
        assert max(of_weight) - min(of_weight) <= longest + 1e-9
