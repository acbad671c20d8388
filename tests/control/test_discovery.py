from types import SimpleNamespace
from typing import Any

import pytest

from rlix.control.resource_manager import ResourceManager, devices_of
from rlix.protocol.messages import DeviceKind


def node(node_id: str, ip: str, gpus: float, *, alive: bool = True, head: bool = False, virtual: bool = False) -> Any:
    resources: dict[str, float] = {"CPU": 4.0}
    if gpus:
        resources["GPU"] = gpus
    if head:
        resources["node:__internal_head__"] = 1.0
    if virtual:
        resources["rlix_virtual"] = 1.0
    return {
        "NodeID": node_id,
        "Alive": alive,
        "NodeManagerAddress": ip,
        "Resources": resources,
        "NodeManagerHostname": node_id,
    }


def test_ids_are_dense_head_first_then_by_address() -> None:
    nodes = [
        node("d", "10.0.0.10", 2),
        node("c", "10.0.0.9", 3, virtual=True),  # as numbers: .9 comes before .10
        node("z", "10.0.0.1", 1, alive=False),
        node("b", "10.0.0.9", 0),
        node("a", "10.0.0.200", 1, head=True),
    ]
    devices = devices_of(nodes)
    assert [d.id for d in devices] == [0, 1, 2, 3, 4, 5]
    assert [d.node_id for d in devices] == ["a", "c", "c", "c", "d", "d"]
    assert [d.index for d in devices] == [0, 0, 1, 2, 0, 1]
    assert [d.kind for d in devices] == [DeviceKind.CUDA] + [DeviceKind.CPU] * 3 + [DeviceKind.CUDA] * 2
    assert devices == devices_of(reversed(nodes))


def test_devices_have_the_keys_of_their_node_or_ones_of_their_own() -> None:
    nodes = [
        node("a", "10.0.0.1", 2, head=True),
        node("0123456789abcdef", "10.0.0.2", 2, virtual=True),
        node("b", "10.0.0.3", 1),
    ]
    devices = devices_of(nodes, {"a": ("GPU-4", "GPU-5"), "0123456789abcdef": ()})
    assert [d.key for d in devices] == [
        "GPU-4",
        "GPU-5",
        "virtual-0123456789ab-0",
        "virtual-0123456789ab-1",
        "cuda-b-0",
    ]
    assert [d.index for d in devices] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("taken", [2, 1])
def test_a_scheduler_that_did_not_take_in_every_device_is_told_again(taken: int) -> None:
    found = devices_of([node("a", "10.0.0.1", 2)]), frozenset[str]()
    scheduler = SimpleNamespace(ask=lambda method, *_, **__: taken if method == "found" else "its process")
    manager: Any = SimpleNamespace(_scheduler=scheduler, _scheduler_process=lambda: "its process")
    assert ResourceManager._tell(manager, found) == taken
    assert (manager._told == (found, "its process")) == (taken == 2)
