"""The proportional policy against values computed by hand, and against plain D'Hondt."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.scheduler.planner import plan
from rlix.scheduler.policies.proportional import Proportional
from tests.scheduler.world import World, shuffled


def counts_of(pool: int, demands: dict[str, int], size: int = 1) -> dict[str, int]:
    world = World(pool)
    for name, trajectories in demands.items():
        world.register(name, range(pool), size=size)
        world.demand(name, trajectories)
    world.cycle()
    return world.counts()


@pytest.mark.parametrize(
    ("pool", "demands", "expected"),
    [
        (8, {"a": 10, "b": 30}, {"a": 2, "b": 6}),
        (4, {"a": 512, "b": 512}, {"a": 2, "b": 2}),
        (10, {"a": 60, "b": 30, "c": 10}, {"a": 6, "b": 3, "c": 1}),
        (4, {"a": 1000, "b": 1, "c": 1}, {"a": 2, "b": 1, "c": 1}),  # nobody at zero
        (8, {"a": 2, "b": 3}, {"a": 2, "b": 3}),  # never more bundles than trajectories
        (8, {"a": 0, "b": 3}, {"b": 3}),
        (2, {"a": 5, "b": 5, "c": 5}, {"a": 1, "b": 1}),
    ],
)
def test_division_by_hand(pool: int, demands: dict[str, int], expected: dict[str, int]) -> None:
    assert counts_of(pool, demands) == expected


def test_shares_are_of_devices_not_of_bundles() -> None:
    """Equal demand, bundles of 4 and of 1: eight devices each."""
    world = World(16)
    world.register("narrow", range(16))
    world.register("wide", range(16), size=4)
    world.demand("narrow", 100)
    world.demand("wide", 100)
    world.cycle()
    assert world.counts() == {"narrow": 8, "wide": 8}


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(1, 300), min_size=1, max_size=10))
def test_equals_plain_dhondt_where_placement_does_not_matter(pool: int, demands: list[int]) -> None:
    seats: Counter[int] = Counter()
    for _ in range(pool):
        open_to = [i for i, d in enumerate(demands) if seats[i] < d]
        if open_to:
            # first seats come first, and among them whoever reported first has waited longest
            seats[max(open_to, key=lambda i: (not seats[i], bool(seats[i]) * demands[i] / (seats[i] + 1), -i))] += 1
    got = counts_of(pool, {f"p{i:02d}": d for i, d in enumerate(demands)})
    assert got == {f"p{i:02d}": n for i, n in seats.items()}


def test_held_bundles_stay_and_equal_jobs_do_not_swap() -> None:
    world = World(3)
    for name in ("a", "b"):
        world.register(name, [0, 1, 2])
    world.demand("a", 100)
    world.demand("b", 100)
    world.cycle()
    before = world.held()
    for a, b in [(90, 100), (100, 90), (80, 99), (99, 80), (100, 100)]:
        world.demand("a", a)
        world.demand("b", b)
        assert not world.cycle()
    assert world.held() == before


def test_a_transfer_needs_the_margin() -> None:
    """a holds 2 of 4, b holds 2. A third bundle is worth 300/3 = 100 to b, a's second is worth d/2."""
    for trajectories, moves in [(200, False), (162, False), (158, True)]:
        world = World(4)
        for name in ("a", "b"):
            world.register(name, range(4))
            world.demand(name, 200)
        world.cycle()
        assert world.counts() == {"a": 2, "b": 2}
        world.demand("a", trajectories)
        world.demand("b", 300)
        assert bool(world.cycle()) is moves, trajectories


def test_parked_rollouts_keep_their_bundles_until_somebody_needs_them_and_give_way_first() -> None:
    world = World(4)
    for name in ("busy", "parked", "new"):
        world.register(name, range(4))
    world.demand("busy", 100)
    world.demand("parked", 100)
    world.cycle()
    world.demand("busy", 2)
    world.demand("parked", 0)
    assert not world.cycle(), "busy can use no third bundle, so nobody needs the parked ones"
    busy = world.held()["busy"]
    world.demand("new", 1)
    assert len(world.cycle().shrinks) == 1
    assert world.counts() == {"busy": 2, "parked": 1, "new": 1}
    assert world.held()["busy"] == busy


def test_bundles_beyond_the_demand_give_way_before_useful_ones() -> None:
    world = World(6)
    for name in ("a", "b", "new"):
        world.register(name, range(6))
    world.demand("a", 90)
    world.demand("b", 90)
    world.cycle()
    world.demand("a", 1)
    world.demand("b", 3)
    world.demand("new", 2)
    world.cycle()
    assert world.counts() == {"a": 1, "b": 3, "new": 2}


def test_a_rollout_at_zero_takes_from_one_that_has_two() -> None:
    world = World(2)
    world.register("a", [0, 1])
    world.register("b", [1])
    world.demand("a", 500)
    world.cycle()
    world.demand("b", 1)
    world.cycle()
    assert world.held() == {"a": [0], "b": [1]}


def test_rollouts_move_along_a_path_to_seat_one_more() -> None:
    """a on {0,1}, b on {1,2}, c on {0}: everybody fits only as c=0, a=1, b=2."""
    world = World(3)
    world.register("a", [0, 1])
    world.register("b", [1, 2])
    world.register("c", [0])
    world.demand("a", 1)
    world.cycle()
    world.demand("b", 1)
    world.cycle()
    assert world.held() == {"a": [0], "b": [1]}
    world.demand("c", 1)
    changes = world.cycle()
    assert world.held() == {"a": [1], "b": [2], "c": [0]}
    assert len(changes.shrinks) == 2


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 7))
def test_as_many_rollouts_are_seated_as_can_be(seed: int, pool: int, jobs: int) -> None:
    """Bundles of one device, nothing held: the number seated is a maximum bipartite matching (checked by Hall)."""
    rng = random.Random(seed)
    world = World(pool)
    reach = []
    for job in range(jobs):
        ids = rng.sample(range(pool), rng.randint(1, min(3, pool)))
        world.register(f"p{job}", ids)
        world.demand(f"p{job}", rng.choice([1, 1, 5]))
        reach.append(set(ids))
    world.cycle()
    subsets = [[r for i, r in enumerate(reach) if mask >> i & 1] for mask in range(2**jobs)]
    deficiency = max(len(subset) - len(set().union(*subset)) for subset in subsets)
    assert len(world.held()) == jobs - deficiency


def test_free_devices_that_no_gang_waits_for_are_used_first() -> None:
    world = World(4)
    world.register("trains", [3], train=[0, 1])
    world.register("blocked", [3], train=[1, 2])
    world.register("r", [2, 3])
    world.request("trains")
    world.cycle()
    world.request("blocked")
    world.demand("r", 1)
    world.cycle()
    assert world.held() == {"r": [3]}


def test_patience_rotates_the_bundle_held_longest() -> None:
    world = World(2, Proportional(patience_s=2.0))
    for name in ("a", "b", "c"):
        world.register(name, [0, 1])
        world.demand(name, 50)
    world.cycle()
    assert world.counts() == {"a": 1, "b": 1}
    seen = []
    for _ in range(9):
        world.now += 1.0
        world.acknowledge()
        world.cycle()
        seen.append("".join(sorted(world.held())))
    assert seen == ["ab", "bc", "bc", "ac", "ac", "ab", "ab", "bc", "bc"]


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_same_snapshot_same_plan_whatever_the_order(seed: int) -> None:
    rng = random.Random(seed)
    world = World(12)
    for job in range(5):
        size = rng.choice([1, 2, 3])
        world.register(f"p{job}", rng.sample(range(12), size * rng.randint(1, 12 // size)), [rng.randrange(12)], size)
        world.demand(f"p{job}", rng.randint(0, 20))
        if rng.random() < 0.5:
            world.request(f"p{job}")
        world.cycle()
    for job in range(5):
        world.demand(f"p{job}", rng.randint(0, 20))
    snapshot = world.snapshot()
    assert plan(snapshot) == plan(snapshot) == plan(shuffled(snapshot, rng))
