import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Cluster, Device, DeviceKind, Registration
from rlix.scheduler.placement import MAX_ALTERNATIVES, Arrivals, Wish, place


def pool(*nodes: int, first: int = 0, step: int = 1) -> tuple[Device, ...]:
    """Nodes with so many devices each; ids from `first` on, `step` apart."""
    slots = [(node, index) for node, count in enumerate(nodes) for index in range(count)]
    return tuple(
        Device(first + step * number, f"node{node}", "127.0.0.1", index, DeviceKind.CPU)
        for number, (node, index) in enumerate(slots)
    )


def gang(size: int, name: str = "train", least: int = 0, **rest: object) -> Wish:
    return Wish(name, least=least or size, most=size, **rest)  # type: ignore[arg-type]


def infer(size: int = 0, parallel: int = 1, name: str = "infer") -> Wish:
    return Wish(name, parallel, elastic=True, least=size, most=size)


def job(name: str, *clusters: Cluster) -> Registration:
    return Registration(name, "ns", clusters)


def on(*devices: int) -> Registration:
    """Another pipeline with a gang there."""
    return job(f"other_{devices}", Cluster("train", 1, devices))


def devices_of(*args: object) -> list[tuple[int, ...]]:
    return [cluster.devices for cluster in place(*args)]  # type: ignore[arg-type]


class TestGangs:
    def test_take_the_first_aligned_block_of_an_empty_pool(self) -> None:
        assert devices_of([gang(4)], pool(8, 8)) == [(0, 1, 2, 3)]
        assert devices_of([gang(3)], pool(8)) == [(0, 1, 2)]

    def test_take_the_least_crowded_block(self) -> None:
        others = [on(0, 1, 2, 3), on(4, 5), on(8, 9, 10, 11)]
        assert devices_of([gang(4)], pool(8, 8), others) == [(12, 13, 14, 15)]
        assert devices_of([gang(2)], pool(8, 8), others) == [(6, 7)]
        assert devices_of([gang(8)], pool(8, 8), others) == [(8, 9, 10, 11, 12, 13, 14, 15)]  # fewer meet it there

    def test_a_queue_of_two_is_worse_than_two_queues_of_one(self) -> None:
        assert devices_of([gang(4)], pool(8), [on(0), on(0), on(4, 5, 6, 7)]) == [(4, 5, 6, 7)]

    def test_rollouts_crowd_nobody(self) -> None:
        others = [job("other", Cluster("infer", 1, tuple(range(4)), elastic=True))]
        assert devices_of([gang(4)], pool(8), others) == [(0, 1, 2, 3)]

    def test_skip_nodes_that_are_too_small(self) -> None:
        assert devices_of([gang(4)], pool(3, 6)) == [(3, 4, 5, 6)]

    def test_larger_than_a_node_take_whole_bundles(self) -> None:
        assert devices_of([gang(16)], pool(8, 8, 8, 8), [on(0)]) == [tuple(range(16, 32))]
        # node 0 has one device too many for bundles of two
        assert devices_of([gang(4, tensor_parallel_size=2)], pool(3, 3)) == [(0, 1, 3, 4)]
        assert devices_of([gang(4, tensor_parallel_size=4)], pool(2, 2)) == [(0, 1, 2, 3)]

    def test_ids_with_gaps_in_any_order(self) -> None:
        devices = pool(4, 4, first=10, step=3)
        assert devices_of([gang(4)], devices[::-1], [on(10)]) == [(22, 25, 28, 31)]

    def test_of_one_pipeline_share_a_block(self) -> None:
        wishes = [gang(2, "critic"), gang(4, "train"), gang(4, "reference"), gang(1, "reward")]
        others = [on(0, 1, 2, 3), on(4)]
        assert devices_of(wishes, pool(4, 4, 4), others) == [(8, 9), (8, 9, 10, 11), (8, 9, 10, 11), (8,)]

    def test_come_to_where_devices_are_given(self) -> None:
        wishes = [Wish("train", devices=(2, 1)), gang(2, "critic"), gang(4, "reference"), gang(1, "reward")]
        assert devices_of(wishes, pool(4, 4)) == [(2, 1), (2, 1), (0, 1, 2, 3), (1,)]

    def test_do_not_follow_given_devices_across_nodes(self) -> None:
        assert devices_of([Wish("train", devices=(3, 4)), gang(2, "critic")], pool(4, 4)) == [(3, 4), (2, 3)]


class TestAlternatives:
    def test_one_is_off_the_jobs_other_gangs(self) -> None:
        wide, narrow = place([gang(32, "wide"), gang(2, "narrow")], pool(64))
        assert narrow.devices == (0, 1)
        assert len(narrow.alternatives) == MAX_ALTERNATIVES
        assert not set(wide.devices).isdisjoint(narrow.alternatives[0])
        assert narrow.alternatives[-1] == (32, 33)

    def test_are_the_other_blocks_the_least_crowded_and_nearest_first(self) -> None:
        (cluster,) = place([gang(2)], pool(4, 4), [on(0, 1, 2, 3), on(6, 7), on(6, 7)])
        assert cluster.devices == (4, 5)
        assert cluster.alternatives == ((2, 3), (0, 1), (6, 7))

    def test_are_on_the_same_node_before_another(self) -> None:
        (cluster,) = place([gang(2)], pool(6, 6), [on(0, 1, 2, 3), on(6, 7, 8, 9, 10, 11)])
        assert cluster.devices == (4, 5)
        assert cluster.alternatives == ((2, 3), (0, 1), (6, 7), (8, 9), (10, 11))

    def test_are_capped(self) -> None:
        (cluster,) = place([gang(1)], pool(8, 8))
        assert cluster.alternatives == tuple((i,) for i in range(1, MAX_ALTERNATIVES + 1))

    def test_of_a_range_are_the_widest_first_and_narrower_ones_too(self) -> None:
        (cluster,) = place([gang(8, least=4, tensor_parallel_size=2)], pool(8, 8))
        assert cluster.devices == tuple(range(8))
        assert [len(block) for block in cluster.alternatives] == [8, 6, 6, 4, 4, 4, 4]
        assert cluster.alternatives[0] == tuple(range(8, 16))
        assert cluster.alternatives[1:4] == (tuple(range(6)), tuple(range(8, 14)), (0, 1, 2, 3))

    def test_of_a_wide_range_reach_its_narrow_end(self) -> None:
        (cluster,) = place([gang(64, least=4)], pool(*[8] * 16))
        widths = [len(block) for block in cluster.alternatives]
        assert len(widths) == MAX_ALTERNATIVES
        assert (widths[0], widths[-1]) == (64, 4)

    def test_are_for_gangs_that_can_move(self) -> None:
        clusters = place([gang(2, moves=False), Wish("critic", devices=(0, 1)), infer(2)], pool(8))
        assert [cluster.alternatives for cluster in clusters] == [(), (), ()]


class TestRollouts:
    def test_span_the_pool_in_whole_bundles(self) -> None:
        (cluster,) = place([infer(parallel=2)], pool(3, 4))
        assert cluster.elastic
        assert cluster.bundles == ((0, 1), (3, 4), (5, 6))
        assert devices_of([infer(parallel=4)], pool(3, 2)) == [(0, 1, 2, 3)]  # larger than every node

    def test_contain_their_own_gang_first(self) -> None:
        wishes, others = [gang(2), infer(4)], [on(0, 1), on(2, 3)]
        assert devices_of(wishes, pool(8), others) == [(4, 5), (4, 5, 6, 7)]
        assert devices_of([gang(4), infer(2)], pool(8), [on(0)]) == [(4, 5, 6, 7), (4, 5)]
        assert devices_of([Wish("train", devices=(3, 4)), infer(4, 2)], pool(8)) == [(3, 4), (2, 3, 4, 5)]

    def test_of_one_pipeline_may_be_several(self) -> None:
        wishes = [infer(name="draft"), gang(2), infer(4, 2, name="policy")]
        assert devices_of(wishes, pool(4, 4)) == [tuple(range(8)), (0, 1), (0, 1, 2, 3)]

    def test_that_do_not_fit(self) -> None:
        with pytest.raises(SpecError, match=r"^cluster 'infer': 6 devices in bundles of 2 .* whole bundles of 2 for 4"):
            place([infer(6, 2)], pool(3, 3))
        with pytest.raises(SpecError, match="bundles of 16 do not fit the pool"):
            place([infer(parallel=16)], pool(8))
        with pytest.raises(SpecError, match="'train': 6 devices in bundles of 2"):
            place([gang(6, tensor_parallel_size=2)], pool(3, 3))


SIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Wish], tuple[Device, ...], list[Registration]]:
    devices = pool(*draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)), first=draw(st.integers(0, 50)), step=3)
    ids = [device.id for device in devices]
    some = st.lists(st.sampled_from(ids), min_size=1, max_size=8, unique=True).map(tuple)
    others = [on(*taken) for taken in draw(st.lists(some, max_size=6))]
    wishes = []
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True)):
        parallel = draw(st.sampled_from([1, 1, 2, 4]))
        whole = sum(n // parallel for n in _node_sizes(devices)) or len(ids) // parallel
        if not whole or draw(st.integers(0, 4)) == 0:
            wishes.append(Wish(name, devices=draw(some), elastic=draw(st.booleans())))
            continue
        most = draw(st.integers(1, whole))
        elastic = draw(st.booleans())
        least = most if elastic else draw(st.integers(1, most))
        wishes.append(Wish(name, parallel, elastic, least=least * parallel, most=most * parallel))
    return wishes, devices, others


def _node_sizes(devices: tuple[Device, ...]) -> list[int]:
    nodes = [device.node_id for device in devices]
    return [nodes.count(node) for node in set(nodes)]


@given(worlds())
def test_every_cluster_gets_what_it_asked_for(world: tuple[list[Wish], tuple[Device, ...], list[Registration]]) -> None:
    wishes, devices, others = world
    node = {device.id: device.node_id for device in devices}
    largest = max(_node_sizes(devices))
    for wish, cluster in zip(wishes, place(wishes, devices, others), strict=True):
        assert (cluster.name, cluster.elastic) == (wish.name, wish.elastic)
        if wish.devices:
            assert (cluster.devices, cluster.alternatives) == (wish.devices, ())
            continue
        assert len(cluster.devices) == wish.most
        assert not (wish.elastic and cluster.alternatives)
        assert len(cluster.alternatives) <= MAX_ALTERNATIVES
        assert len(set(map(frozenset, cluster.choices))) == len(cluster.choices)
        lengths = [len(block) for block in cluster.alternatives]
        assert lengths == sorted(lengths, reverse=True)
        for block in cluster.choices:
            assert len(set(block)) == len(block)
            assert len(block) in (wish.widths if not wish.elastic else (wish.most,))
            size = wish.tensor_parallel_size
            unit = len(block) if not wish.elastic and len(block) <= largest else size
            if unit <= largest:
                parts = [block[i : i + unit] for i in range(0, len(block), unit)]
                assert all(len({node[device] for device in part}) == 1 for part in parts)


@given(worlds(), st.randoms(use_true_random=False))
def test_the_same_pool_gives_the_same_placement(
    world: tuple[list[Wish], tuple[Device, ...], list[Registration]], rng: random.Random
) -> None:
    wishes, devices, others = world
    again = place(wishes, rng.sample(devices, len(devices)), rng.sample(others, len(others)))
    assert again == place(wishes, devices, others)


@given(st.integers(1, 4), SIZES, st.integers(1, 40))
def test_gangs_of_one_size_spread_evenly(nodes: int, size: int, count: int) -> None:
    devices = pool(*[8] * nodes)
    others: list[Registration] = []
    for number in range(count):
        others.append(job(f"job_{number}", *place([gang(size), infer()], devices, others)))
    crowd = [sum(device.id in other.cluster("train").devices for other in others) for device in devices]
    assert max(crowd) - min(crowd) <= 1


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(0, 8))
def test_a_pipelines_own_gangs_nest(sizes: list[int], taken: int) -> None:
    wishes = [gang(size, f"gang_{number}") for number, size in enumerate(sizes)]
    placed = place([*wishes, infer(8)], pool(8, 8), [on(*range(taken))] if taken else [])
    widest = max((set(cluster.devices) for cluster in placed[:-1]), key=len)
    assert all(widest >= set(cluster.devices) for cluster in placed[:-1])
    assert widest <= set(placed[-1].devices)


class TestArrivals:
    """Devices that come to a pool in which jobs run."""

    def test_are_offered_to_who_may_run_anywhere(self) -> None:
        before, after = pool(4), pool(4, 4)
        moves, stays = place([gang(2)], before)[0], place([gang(2, moves=False)], before)[0]
        assert moves.choices == ((0, 1), (2, 3))
        offered = Arrivals(after, {4, 5, 6, 7}).offered(moves)
        assert offered.devices == (0, 1)
        assert set(offered.alternatives) == {(2, 3), (4, 5), (6, 7)}
        assert Arrivals(after, {4, 5, 6, 7}).offered(offered) == offered, "it has them"
        frozen = Cluster("train", 1, (0, 1), ((2, 3),))
        assert not (stays.anywhere or frozen.anywhere) and moves.anywhere

    def test_take_the_places_of_what_left_and_of_some_others(self) -> None:
        cluster = place([gang(1, least=1)], pool(20))[0]
        assert len(cluster.alternatives) == MAX_ALTERNATIVES
        grown = pool(20, 4)
        offered = Arrivals(grown, {20, 21, 22, 23}).offered(cluster)
        assert {(20,), (21,), (22,), (23,)} < set(offered.alternatives)
        assert len(offered.alternatives) == MAX_ALTERNATIVES
        replaced = [device for device in grown if device.id >= 20 or device.id == cluster.devices[0]]
        assert set(Arrivals(replaced, {20, 21, 22, 23}).offered(cluster).alternatives) == {(20,), (21,), (22,), (23,)}

    def test_are_offered_to_each_cluster_in_another_order(self) -> None:
        arrivals, cluster = Arrivals(pool(2, 8), set(range(2, 10))), place([gang(2)], pool(2))[0]
        assert len({arrivals.offered(cluster).alternatives[0] for _ in range(4)}) == 4

    def test_leave_narrower_blocks_behind_wide_ones(self) -> None:
        cluster = place([gang(2, least=1)], pool(2))[0]
        assert cluster.alternatives == ((0,), (1,))
        assert Arrivals(pool(2, 2), {2, 3}).offered(cluster).alternatives == ((2, 3), (0,), (1,))
