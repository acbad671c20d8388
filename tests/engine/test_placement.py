from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.placement import check_bundles, choose, select
from rlix.protocol.messages import Device, DeviceKind


def device(number: int, node: str = "a") -> Device:
    return Device(number, node, "127.0.0.1", number, DeviceKind.CPU, f"key-{number}")


class Engine:
    name = "infer-1234"
    devices: tuple[Device, ...] = ()


NODES = [device(0), device(1), device(2), *(device(n, "b") for n in (3, 4, 5))]


def ids(chosen: tuple[Device, ...]) -> list[int]:
    return [d.id for d in chosen]


def test_a_bundle_stays_on_one_node_where_that_can_be() -> None:
    assert ids(select(4, NODES, bundle=2, load=Counter())) == [0, 1, 3, 4]
    assert ids(select(2, NODES, bundle=2, load=Counter({NODES[0]: 1, NODES[1]: 1}))) == [3, 4]
    assert ids(select(3, NODES, bundle=1, load=Counter({NODES[0]: 1}))) == [3, 4, 5]
    assert ids(select(6, NODES, bundle=2, load=Counter())) == [0, 1, 2, 3, 4, 5]  # there is no fit
    assert ids(select(4, NODES, bundle=4, load=Counter())) == [0, 1, 2, 3]


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
    room = sum(size // bundle for size in Counter(d.node_id for d in pool).values())
    if room >= count:
        groups = [chosen[first : first + bundle] for first in range(0, len(chosen), bundle)]
        assert all(len({d.node_id for d in group}) == 1 for group in groups)


def test_devices_under_a_jobs_lease_are_not_taken() -> None:
    assert ids(select(2, NODES, leased=frozenset(NODES[:5][:2] + NODES[3:5]), load=Counter())) == [2, 5]
    with pytest.raises(ValueError, match=r"3 device.*6 in the pool, 2 under no job's lease"):
        select(3, NODES, leased=frozenset(NODES[:4]), load=Counter())


def test_numbers_are_no_devices() -> None:
    with pytest.raises(ValueError, match=r"devices: 0 is none: choose from rlix\.engine\.placement\.pool_devices"):
        choose(1, devices=[0])  # type: ignore[list-item]


def test_named_devices_keep_their_order() -> None:
    named = [NODES[4], NODES[0], NODES[3], NODES[1]]
    assert choose(4, bundle=2, devices=named) == tuple(named)


def test_a_replica_over_two_nodes_is_refused() -> None:
    check_bundles(NODES, 3)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size=2: .* one node, but .* 2 on .*, 3 on .*; take a"):
        check_bundles(NODES, 2)


@pytest.mark.parametrize("condition", ["colocate_with", "not_colocate_with"])
def test_a_condition_on_an_engine_without_devices_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match=rf"^{condition} names infer-1234, which has no devices: it is not built"):
        choose(1, devices=NODES, **{condition: Engine()})
