from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.placement import bundles_of, by_node, choose, select
from rlix.protocol.messages import Device, DeviceKind


def device(number: int, node: str = "a") -> Device:
    return Device(number, node, "127.0.0.1", number, DeviceKind.CPU, f"key-{number}")


class Engine:
    name = "infer-1234"
    devices: tuple[Device, ...] = ()


NODES = [device(0), device(1), device(2), *(device(n, "b") for n in (3, 4, 5))]


def ids(chosen: Sequence[Device]) -> list[int]:
    return [d.id for d in chosen]


def test_a_bundle_stays_on_one_node_where_that_can_be() -> None:
    assert ids(select(4, NODES, bundle=2, load=Counter())) == [0, 1, 3, 4]
    assert ids(select(2, NODES, bundle=2, load=Counter({NODES[0]: 1, NODES[1]: 1}))) == [3, 4]
    assert ids(select(3, NODES, bundle=1, load=Counter({NODES[0]: 1}))) == [3, 4, 5]
    assert ids(select(6, NODES, bundle=2, load=Counter())) == [0, 1, 2, 5, 3, 4]  # of three, two fit


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_bundles_fit_whenever_they_can(nodes: list[int], bundle: int, count: int, loads: list[int]) -> None:
    pool = [device(number, f"node-{node}") for number, node in enumerate(nodes)]
    load = Counter({d: loads[d.id] for d in pool})
    if bundle * count > len(pool):
        with pytest.raises(ValueError, match=f"{bundle * count} device"):
            select(bundle * count, pool, bundle=bundle, load=load)
        return
    chosen = select(bundle * count, pool, bundle=bundle, load=load)
    assert len(set(chosen)) == bundle * count
    sizes = Counter(d.node_id for d in pool)
    room = sum(size // bundle for size in sizes.values())
    if room >= count:
        groups = [chosen[first : first + bundle] for first in range(0, len(chosen), bundle)]
        assert all(len({d.node_id for d in group}) == 1 for group in groups)
    if count == 1 and bundle % 2 == 0 and sum(size >= bundle // 2 for size in sizes.values()) >= 2:
        bundles_of(chosen, bundle, spans=True)


def test_devices_under_a_jobs_lease_are_not_taken() -> None:
    assert ids(select(2, NODES, leased=frozenset(NODES[:5][:2] + NODES[3:5]), load=Counter())) == [2, 5]
    with pytest.raises(ValueError, match=r"3 device.*6 in the pool, 2 under no job's lease"):
        select(3, NODES, leased=frozenset(NODES[:4]), load=Counter())


def test_numbers_are_no_devices() -> None:
    with pytest.raises(ValueError, match=r"devices: 0 is no device: choose from rlix\.pool_devices"):
        choose(1, devices=[0])  # type: ignore[list-item]


def test_named_devices_keep_their_order() -> None:
    named = [NODES[4], NODES[0], NODES[3], NODES[1]]
    assert choose(4, bundle=2, devices=named) == tuple(named)


def test_a_replica_over_two_nodes_is_refused() -> None:
    bundles_of(NODES, 3, spans=False)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size=2: .* one node, but .* 2 on .*, 3 on .*; take a"):
        bundles_of(NODES, 2, spans=False)


def test_a_replica_that_may_span_nodes_takes_as_many_devices_of_each() -> None:
    bundles_of(NODES, 2, spans=True)
    bundles_of(NODES, 6, spans=True)
    assert [ids(share) for share in by_node(NODES)] == [[0, 1, 2], [3, 4, 5]]
    for uneven in ([0, 1, 2, 3], [0, 3, 1, 4]):
        with pytest.raises(ValueError, match=r"^tensor_parallel_size=4: .* as many devices of each"):
            bundles_of([NODES[number] for number in uneven], 4, spans=True)


def test_a_bundle_larger_than_a_node_takes_equal_shares_of_few() -> None:
    assert ids(select(4, NODES, bundle=4, load=Counter())) == [0, 1, 3, 4]
    assert ids(select(4, NODES, bundle=4, load=Counter({NODES[0]: 1, NODES[3]: 1}))) == [1, 2, 4, 5]
    pool = [device(number, f"node-{number // 2}") for number in range(8)]
    chosen = select(8, pool, bundle=4, load=Counter({pool[1]: 1}))
    assert set(chosen) == set(pool)
    bundles_of(chosen, 4, spans=True)
    assert ids(select(4, pool, bundle=4, load=Counter({pool[0]: 1, pool[4]: 1}))) == [2, 3, 6, 7]


@pytest.mark.parametrize("condition", ["colocate_with", "not_colocate_with"])
def test_a_condition_on_an_engine_without_devices_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match=rf"^{condition} names infer-1234, which has no devices: it is not built"):
        choose(1, devices=NODES, **{condition: Engine()})
